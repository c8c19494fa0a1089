"""Check, once per model, that log-probs from a packed tree and from the head equal the model's own.

A short branching tree is run both ways in float32, whatever the model's own dtype, so that rounding hides nothing;
windows and chunks are made small enough to matter in it, and adapters that start as the identity are moved off it.
This catches what no attribute of a model tells: layers that mix tokens without attention, logits changed after the
head.
"""

import math
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..ops.matmul import ieee_products
from ..ops.row_softmax import FLOAT32_NOISE
from ..packing.packs import lay_out
from ..packing.prefix_tree import Pack, Query
from .fsdp import without_casts
from .head import Head, read_head
from .liger import keep_own_modules, runs_fused
from .memory import is_out_of_memory
from .model import backbone, causal_lm, computation, configs, input_device, noise_settings, vocab_size
from .model_walk import Model, ModelWalk
from .modes import attention_implementation, checkpointed_modules, evaluation_mode, without_accelerates_autocast
from .probe_mode import HALVES, float32_weights, small_windows
from .ranks import inside
from .stateful_layers import has_cells, refuse_older_cells
from .tree_forward import pack_states, tree_training_mode


@dataclass
class _SelfCheck:
    computation: int  # of the model that was checked
    transform: tuple[float | None, float]  # softcap and scale of its logits
    packed: set[bool] = field(default_factory=set)  # `runs_fused` of the packed trees that were checked
    trained: set[bool] = field(default_factory=set)  # the same in training mode


_CHECKED: weakref.WeakKeyDictionary[PreTrainedModel, _SelfCheck] = weakref.WeakKeyDictionary()

# Log-probs that differ by more than this many nats are wrong, unless the model's own rounding is worse: float32
# leaves some 1e-5, a wrong mask, position or transform of logits whole nats.
_TOLERANCE = 1e-3
_ROUNDINGS = 8  # tolerated multiple of the difference between the model's own two ways of computing a row

_Result = TypeVar("_Result")

_SHARE = 0.02  # tolerated share of what masking moves
_LARGE = 60.0  # the largest logit before scale and cap
_ALMOST_ONE = 1 - 2**-8  # below 1 in every dtype
_LORA_DROPOUT = "set lora_dropout=0 in its LoraConfig (TRL's ModelConfig sets 0.05)"
_LENGTH = 24  # tokens of the probe


def check_head(model: Model) -> Head:
    """Return the output layer with the model's scale and cap of logits, after checking that it gives its log-probs.

    Checked again when what `model.computation` covers has changed, such as a cap, a `forward` or a hook on the head;
    the weights are read at every call.

    Raises:
        NotImplementedError: the head is not a plain linear layer, or the model's logits are not its head's output,
            scaled and capped as its configuration says; the message names the model.
    """
    walk = ModelWalk.of(model)
    model = walk.model
    head = read_head(model)
    found, now = _CHECKED.get(model), computation(walk)
    if found is None or found.computation != now:
        found = _CHECKED[model] = _SelfCheck(now, _checked_transform(model))
    softcap, scale = found.transform
    return replace(head, softcap=softcap, logit_scale=scale)


def check_supported(model: Model) -> Head:
    """Check as `check_head` does, and that a packed tree gives the model's own log-probs.

    Raises:
        NotImplementedError: the tree does not, or cannot be run; the message names the model and the reason.
    """
    walk = ModelWalk.of(model)
    refuse_older_cells(walk)
    head = check_head(walk)
    if runs_fused(walk) not in _CHECKED[walk.model].packed:
        _check_layout(walk.model)
    return head


def check_trainable(model: Model) -> Head:
    """Check as `check_supported` does, and that what training mode changes does not depend on the layout.

    The model is checked in the mode that it is in.

    Raises:
        NotImplementedError: as `check_supported`, and for dropout above 0 (a row that completions share would get one
            mask for all of them), losses of routers, noise in training mode, and checkpointed layers with a state.
    """
    walk = ModelWalk.of(model)
    model, head = walk.model, check_supported(walk)
    if reason := _training_obstacle(walk):
        raise NotImplementedError(f"model: {type(model).__name__} {_refused(*reason)}")
    if runs_fused(walk) not in _CHECKED[model].trained and any(m.training for m in walk.modules.values()):
        _check_repeatable(model)
        _check_layout(model, training=True)
    return head


def check_model(model: nn.Module) -> None:
    """Check that a model can be scored and trained on packed trees, in the mode that it is in; once per structure.

    Scoring and training check by themselves; call it before a run to get a refusal at once.

    Args:
        model: a transformers causal model, or what wraps one.

    Raises:
        NotImplementedError: it cannot; names the model, the reason and, where there is one, the remedy.
        TypeError: it is not a transformers causal model.
    """
    check_trainable(causal_lm(model))


def _refused(what: str, why: str) -> str:
    return f"{what}, so it cannot be trained on packed trees: {why}"


def _training_obstacle(walk: ModelWalk) -> tuple[str, str] | None:
    """Find what the model does that packed trees do not allow in training, and why not with the remedy."""
    for name, module in walk.modules.items():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            remedy = _LORA_DROPOUT if "lora_dropout" in name else f"set it to 0{_settings(walk.model)}"
            return f"has dropout {module.p} in {name}", f"rows that completions share would get one mask; {remedy}"
    if getattr(walk.model.config.get_text_config(), "output_router_logits", False):
        return "adds a loss of its routers (output_router_logits)", "that counts shared rows once; switch it off"
    if has_cells(walk) and checkpointed_modules(walk):
        return (
            "hands states from token to token in checkpointed layers",
            "the second forward would not find them again; switch checkpointing off",
        )
    return None


def _settings(model: PreTrainedModel) -> str:
    """Say how to load the model without the noise of its configuration; empty if that has none."""
    found = noise_settings(model)
    zeros = ", ".join(f"{name}=0" for name, _ in found)
    values = ", ".join(f"{value:g}" for _, value in found)
    return f" (from_pretrained takes {zeros}; its configuration has {values})" if found else ""


def _check_repeatable(model: PreTrainedModel) -> None:
    """Check that two equal calls, in the model's present modes, agree to rounding, whatever is drawn in between."""
    ids = Probe.of(model).ids

    def measure() -> tuple[float, float]:
        with evaluation_mode(model):
            factor = _amplification(_hidden(model, ids), read_head(model))
            _, rounding = _own_logits(model, ids, factor)
        first, second = (_called(model, ids, factor, share) for share in (0.0, _ALMOST_ONE))
        return _gap(model, first.log_softmax(-1), second.log_softmax(-1)), rounding

    gap, rounding = run_probe(model, measure, training=True)
    if not gap <= max(_TOLERANCE, _ROUNDINGS * rounding):
        remedy = _settings(model) or (
            " (no dropout, jitter or noise above 0 in its configuration: look for draws in its own code or its hooks, "
            "such as NEFTune's)"
        )
        what = f"draws at random in training mode (log-probs of two equal calls differ by {gap:.3g} nats)"
        why = f"rows that completions share would get one draw for all of them; switch its noise off{remedy}"
        raise NotImplementedError(f"model: {type(model).__name__} {_refused(what, why)}")


class _EveryThreshold(TorchFunctionMode):
    """Make all uniform draws, such as those that decide whether a layer is skipped, `share`, so rare events show."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.fill_(self.share) if func in (torch.rand, torch.rand_like) else out


def _called(model: PreTrainedModel, ids: Tensor, factor: float, share: float) -> Tensor:
    with _amplified(model, factor), _EveryThreshold(share):
        return whole_model(model)(input_ids=ids, use_cache=False).logits.float()


def _checked_transform(model: PreTrainedModel) -> tuple[float | None, float]:
    """Find the softcap and scale under which the head gives the model's own log-probs."""
    ids = Probe.of(model).ids

    def measure() -> tuple[float, float, tuple[float | None, float]]:
        hidden, head = _hidden(model, ids), read_head(model)
        if hidden.shape[-1] != head.weight.shape[-1]:
            raise NotImplementedError(
                f"model: {type(model).__name__} has a layer between its body, {hidden.shape[-1]} wide, and its head, "
                f"{head.weight.shape[-1]} wide, so it can neither be scored nor trained through that head"
            )
        factor = _amplification(hidden, head)
        theirs, rounding = _own_logits(model, ids, factor)
        linear = functional.linear(hidden.to(head.weight) * factor, head.weight, head.bias).float()
        if linear.shape != theirs.shape:
            raise NotImplementedError(
                f"model: {type(model).__name__} gives logits of shape {tuple(theirs.shape)}, expected "
                f"{tuple(linear.shape)}, those of its head"
            )
        truth = theirs.log_softmax(-1)
        gaps = {
            transform: _gap(model, Head(head.weight, head.bias, *transform).transformed(linear).log_softmax(-1), truth)
            for transform in _transforms(model)
        }
        best = min(gaps, key=lambda transform: gaps[transform])
        return gaps[best], rounding, best

    gap, rounding, transform = run_probe(model, measure)
    if not gap <= max(_TOLERANCE, _ROUNDINGS * rounding):
        raise NotImplementedError(
            f"model: the logits of {type(model).__name__} are not its head's output, as scaled and capped by its "
            f"configuration (log-probs differ by {gap:.3g} nats), so it can neither be scored nor trained through "
            "that head"
        )
    return transform


def _transforms(model: PreTrainedModel) -> list[tuple[float | None, float]]:
    """List softcaps and scales of logits that the configuration names, plain ones first."""
    config = model.config.get_text_config()

    def numbers(*names: str) -> list[float]:
        values = [getattr(config, name, None) for name in names]
        return [float(x) for x in values if isinstance(x, (int, float)) and not isinstance(x, bool) and x > 0]

    caps = numbers("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")
    scales = numbers("logit_scale", "logits_scaling", "lm_head_multiplier", "logits_mup_width_multiplier")
    if width := numbers("dim_model_base"):
        scales.append(width[0] / config.hidden_size)
    scales = [1.0, *scales, *(1 / scale for scale in scales)]
    return [(cap, scale) for cap in (None, *caps) for scale in dict.fromkeys(scales)]


def _check_layout(model: PreTrainedModel, training: bool = False) -> None:
    """Check the tree with the fused modules that the model will run; where they are at fault it keeps its own."""
    found, fused = _CHECKED[model], runs_fused(model)
    try:
        _check_tree(model, training)
    except NotImplementedError as error:
        if not fused:
            raise
        keep_own_modules(model)
        _check_tree(model)
        found.packed.add(False)
        if training:
            _check_tree(model, training)
        warnings.warn(f"model: {type(model).__name__} keeps its own norms, rotations and gates: {error}", stacklevel=2)
    (found.trained if training else found.packed).add(runs_fused(model))


def _check_tree(model: PreTrainedModel, training: bool = False) -> None:
    probe, name, attended = Probe.of(model), type(model).__name__, list[str]()

    def measure() -> tuple[float, float]:
        head = check_head(model)
        factor = _amplification(_hidden(model, probe.ids), head)
        theirs, rounding = _own_logits(model, probe.ids, factor)
        truth = probe.of_targets(theirs)
        try:
            with tree_training_mode(model):
                attended.clear()
                probed = replace(head, weight=head.weight * factor)
                ours = probed.logprobs(*pack_states(model, probed, probe.pack, attended=attended))
        except NotImplementedError as error:
            own = str(error) if str(error).startswith("model:") else f"model: {name}: {error}"
            raise NotImplementedError(f"{own}, so it cannot be scored") from error
        except Exception as error:  # anything that a model's own code raises on a sequence that it does not expect
            if is_out_of_memory(error):
                raise
            raise NotImplementedError(
                f"model: {name} cannot run on a packed tree ({type(error).__name__}: {error}), so it cannot be scored"
            ) from error
        # What earlier tokens do to later ones is what a tree can get wrong: in an untrained model it is small.
        fed, targets = probe.ids[:, probe.first :], probe.targets
        same = ((fed == fed[:1]) & (targets == targets[:1])).to(truth.device)
        mixing = torch.where(same, truth - truth[:1], 0.0).abs().max().item()
        return _gap(model, probe.unpacked(ours).to(truth), truth), max(
            min(_TOLERANCE, _SHARE * mixing), _ROUNDINGS * rounding, FLOAT32_NOISE
        )

    gap, tolerance = run_probe(model, measure, training)
    if not gap <= tolerance:
        raise NotImplementedError(
            f"model: {name} does not compute the same in a packed tree as by itself{' in training mode' * training} "
            f"(log-probs differ by {gap:.3g} nats){_other_mixers(model, attended)}, so it cannot be scored"
        )


def _other_mixers(model: PreTrainedModel, attended: list[str]) -> str:
    """Say what other than attention may look at other tokens, if that can be told."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    layers = getattr(config, "num_hidden_layers", None)
    others = sorted({str(kind) for kind in kinds if "linear" in str(kind) or "attention" not in str(kind)})
    if others:
        return f": its {' and '.join(others)} layers carry a state that several tokens of a branch cannot take up"
    if not attended:
        return ": none of its layers uses attention"
    if isinstance(layers, int) and len(attended) < layers:
        return f": {len(attended)} of its {layers} layers use attention, and the others look at other tokens too"
    return ""


class Probe(NamedTuple):
    """A row and branches that leave it and return, as a batch on the model's device and as one pack."""

    ids: Tensor  # (n, L)
    first: int  # position of the first token whose successor is a target
    targets: Tensor  # (n, L - first)
    pack: Pack

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Probe":
        """Make one: a branch of a branch, two branches one token apart, one at a last token."""
        special = {
            value
            for config in configs(model)
            for key, value in config.to_dict().items()
            if isinstance(value, int) and key.endswith(("_id", "_index"))
        }
        usual = [i for i in range(vocab_size(model)) if i not in special][: 4 * _LENGTH] or [0]
        ids = np.array([usual[(i * 7 + 1) % len(usual)] for i in range(_LENGTH)], dtype=np.int64)
        other = np.array([usual[(i * 11 + 3) % len(usual)] for i in range(_LENGTH)], dtype=np.int64)
        rows, first = [ids], 7
        for row, start, end in ((0, 3, 6), (1, 9, 11), (0, 15, 16), (0, 16, 18), (0, _LENGTH - 2, _LENGTH - 1)):
            branch = rows[row].copy()
            branch[start:end] = other[start:end]
            rows.append(branch)
        (pack,) = lay_out([[Query(row[:-1], first, row[first + 1 :]) for row in rows]], _LENGTH * len(rows))
        batch = torch.from_numpy(np.stack(rows)).to(input_device(model))
        return cls(batch[:, :-1].contiguous(), first, batch[:, first + 1 :], pack)

    def of_targets(self, logits: Tensor) -> Tensor:
        """Return the log-probs (n, L - first) of the targets, given logits (n, L, V) of the batch."""
        logprobs = logits[:, self.first :].log_softmax(-1)
        return logprobs.gather(-1, self.targets.to(logits.device)[..., None])[..., 0]

    def unpacked(self, logprobs: Tensor) -> Tensor:
        """Put log-probs (R,) of the pack's logits rows in the form of `of_targets`."""
        return logprobs[torch.from_numpy(self.pack.query_index).to(logprobs.device)].view_as(self.targets)


def _amplification(hidden: Tensor, head: Head) -> float:
    """Find the factor of the head's input that makes an untrained model's logits show a cap and effects of tokens."""
    largest = functional.linear(hidden.to(head.weight), head.weight, head.bias).abs().max().item()
    return max(1.0, _LARGE / largest) if largest > 0 else 1.0


def _own_logits(model: PreTrainedModel, ids: Tensor, factor: float) -> tuple[Tensor, float]:
    """Compute the model's own logits of `ids` (n, L), fp32, and how far its rounding moves their log-probs, nats.

    The input of the head is multiplied by `factor`. Rounding is the difference between rows in a batch and one by one.
    """
    with _amplified(model, factor):
        together = whole_model(model)(input_ids=ids, use_cache=False).logits.float()
        alone = torch.cat([whole_model(model)(input_ids=row[None], use_cache=False).logits.float() for row in ids[:2]])
    if torch.isnan(together).any():
        raise FloatingPointError(f"model: {type(model).__name__} gives nan logits on an ordinary row of tokens")
    return together, _gap(model, together[:2].log_softmax(-1), alone.log_softmax(-1))


def whole_model(model: PreTrainedModel) -> Callable[..., Any]:
    """Return the model with its hooks; inside what distributes it without them, which would start that anew."""
    return model if inside(model) is None else _met(model, model.forward)


def _hidden(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Compute the hidden states (n, L, H) of `ids` below the head."""
    return _met(model, backbone(model))(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[no-any-return]


def _met(model: PreTrainedModel, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let processes that share the model meet before each call of `forward`: none starts it where one has failed."""

    def together(*args: Any, **kwargs: Any) -> Any:
        if (ranks := inside(model)) is not None:
            ranks.before_forward()
        return forward(*args, **kwargs)

    return together


def _amplified(model: PreTrainedModel, factor: float) -> RemovableHandle:
    """Multiply what the head is given by `factor` inside."""
    return model.get_output_embeddings().register_forward_pre_hook(lambda _, args: (args[0] * factor, *args[1:]))


def _gap(model: PreTrainedModel, ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, of all processes that share the model; a token excluded in both has none."""
    gap = torch.where(ours == theirs, 0.0, ours - theirs).abs().max().nan_to_num(math.inf).item()
    return gap if (ranks := inside(model)) is None else ranks.largest(gap)


def run_probe(
    model: PreTrainedModel, measure: Callable[[], _Result], training: bool = False, moved: bool = True
) -> _Result:
    """Run `measure()` with the model prepared for a probe, in float32 if its layers run in it, else in its own dtype.

    In evaluation mode, or for `training` in the modes that its modules are in; the random state does not change.
    Trainable adapters are shifted if `moved`.
    """
    halves = any(parameter.dtype in HALVES for parameter in model.parameters())
    with ExitStack() as stack:
        if training:
            devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
            stack.enter_context(torch.random.fork_rng(list(devices)))
            stack.enter_context(torch.no_grad())
        else:
            stack.enter_context(evaluation_mode(model))
        if model._can_set_attn_implementation():
            stack.enter_context(attention_implementation(model, "eager"))
        stack.enter_context(small_windows(model))
        stack.enter_context(ieee_products())
        stack.enter_context(without_accelerates_autocast(model))
        stack.enter_context(torch.autocast(input_device(model).type, enabled=False))
        if inside(model) is not None:
            stack.enter_context(without_casts(model))
        try:
            with float32_weights(model, moved):
                return measure()
        except (NotImplementedError, FloatingPointError):
            raise
        except Exception:  # a quantised layer, or a kernel for halves only
            if not halves:
                raise
        return measure()
