"""Check, once per model, that a packed tree and the head give the model's own log-probs.

A short branching tree runs both ways in float32, so that rounding hides nothing. Where float32 weights cannot be had,
for a model in pieces or kernels for halves only, the model's own ways of computing a row say what rounding does.
"""

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from ...ops.matmul import ieee_products
from ...ops.row_softmax import FLOAT32_NOISE
from ...tree.packs import lay_out
from ...tree.prefix_tree import Pack, Query
from ..compiled import EAGER
from ..head import Head, read_head
from ..memory import is_out_of_memory
from ..modes import attention_implementation, evaluation_mode, value_of, without_accelerates_autocast
from ..parts import (
    active_noise,
    backbone,
    causal_lm,
    computation,
    configs,
    input_device,
    noise_remedy,
    own_attention,
    vocab_size,
)
from ..quantised import HALVES, product_dtype
from ..router_loss import packed_router_loss, uses_of_rows
from ..sharded.fsdp import without_casts
from ..sharded.ranks import Ranks, inside
from ..tree_forward import pack_states, packed_hidden, tree_training_mode
from ..walk import Model, ModelWalk
from .probe_mode import float32_weights, layers_skipped
from .structure import repeated_layers

_LOG = logging.getLogger(__name__)


@dataclass
class _Verdict:
    softcap: float | None
    scale: float  # of logits
    rounding: float  # of the model's own log-probs, nats
    trained: bool = False  # a packed tree was right in training mode too
    routed: bool = False  # so was the loss of its routers


# Log-probs that differ by more than this many nats are wrong, unless the model's own rounding is worse: float32
# leaves some 1e-5, a wrong mask, position or transform of logits whole nats.
_TOLERANCE = 1e-3
_ROUNDINGS = 8  # tolerated multiple of the difference between the model's own ways of computing a row
_SHARE = 0.02  # tolerated share of what masking moves
_ROUTER_SHARE = 1e-2  # tolerated share of the routers' loss, which jumps where rounding sends a token elsewhere
_LARGE = 60.0  # the largest logit before scale and cap
_LENGTH = 24  # tokens of the probe

_BY_ITS_HEAD = ", so it can neither be scored nor trained through that head"
_NOT_SCORED = ", so it cannot be scored"
_NOT_TRAINED = ", so it cannot be trained on packed trees: "
_ONE_DRAW = _NOT_TRAINED + "rows that completions share would get one draw for all; "

_Result = TypeVar("_Result")


def check_supported(model: Model) -> Head:
    """Return the output layer, with the model's scale and cap of logits, after checking it and a packed tree.

    Raises:
        NotImplementedError: the head is not a plain linear layer, the model's logits are not its head's output, scaled
            and capped as its configuration says, or a packed tree does not give the model's own log-probs.
    """
    return _supported(ModelWalk.of(model))[0]


def check_trainable(model: Model, *, router_loss: bool = False) -> Head:
    """Check as `check_supported` does, and a packed tree in the mode that the model is in.

    Raises:
        NotImplementedError: as `check_supported`, and for dropout, jitter and other noise, and a loss of routers unless
            it is taken from the tree (`router_loss`) and the same there.
    """
    walk = ModelWalk.of(model)
    head, verdict = _supported(walk)
    for name, what, value in active_noise(walk):
        lora = "lora_dropout=0 in its LoraConfig (TRL's ModelConfig sets 0.05)"
        remedy = lora if "lora_dropout" in name else f"it to 0{noise_remedy(walk.model)}"
        raise _refusal(walk.model, f"has {what} {value:g} in {name}{_ONE_DRAW}set {remedy}")
    if not router_loss and getattr(walk.model.config.get_text_config(), "output_router_logits", False):
        what = f"adds a loss of its routers (output_router_logits){_NOT_TRAINED}that counts shared rows once"
        raise _refusal(walk.model, f"{what}; switch it off")
    if not verdict.trained and any(m.training for m in walk.modules.values()):
        _on_few_layers(walk, lambda repeated: _checked(walk, repeated, training=verdict))
        verdict.trained = True
    if router_loss and not verdict.routed:
        _on_few_layers(walk, lambda repeated: _check_routers(walk, repeated))
        verdict.routed = True
    return head


def was_checked(walk: ModelWalk, *, router_loss: bool = False) -> bool:
    """Whether `check_trainable` has run, and only compares now unless caps, scales or attention have changed."""
    return any(verdict.trained and (verdict.routed or not router_loss) for verdict in walk.checked.values())


def check_model(model: nn.Module) -> None:
    """Check that a model can be scored and trained on packed trees, in its current mode; once per model.

    Scoring and training check by themselves, and again once a module, a `forward`, a hook, a cap or scale of logits or
    an attention function has changed. Call it before a run to get a refusal at once.

    Raises:
        NotImplementedError: names the model, the reason and the remedy if there is one.
        TypeError: `model` is neither a transformers causal model nor a wrapper of one.
    """
    check_trainable(causal_lm(model))


def _supported(walk: ModelWalk) -> tuple[Head, _Verdict]:
    head = read_head(walk.model)
    key, ranks = computation(walk), inside(walk.model)
    due = key not in walk.checked
    # Processes that share a model all check it, or none; once they have, they may be at different queries.
    if due if ranks is None or ranks.checked else ranks.largest(due):
        walk.checked[key] = _on_few_layers(walk, lambda repeated: _checked(walk, repeated))
    verdict: _Verdict = walk.checked[key]
    return replace(head, softcap=verdict.softcap, logit_scale=verdict.scale), verdict


def _on_few_layers(walk: ModelWalk, check: Callable[[Mapping[nn.Module, nn.Module]], _Result]) -> _Result:
    # On the first and last layer of each kind; on all if it fails so, or if processes share the model.
    _LOG.info("checking the model %s: a packed tree must give its own log-probs", type(walk.model).__name__)
    if not isinstance(inside(walk.model), Ranks) and (repeated := repeated_layers(walk)):
        try:
            return check(repeated)
        except Exception as error:
            _LOG.info("checking all its layers: %s", error)
    return check({})


def _refusal(model: PreTrainedModel, what: str) -> NotImplementedError:
    return NotImplementedError(f"model: {type(model).__name__} {what}")


def _checked(walk: ModelWalk, repeated: Mapping[nn.Module, nn.Module], *, training: _Verdict | None = None) -> _Verdict:
    """Check head and tree, in `training` mode the tree only, given the verdict on the head."""
    model, probe = walk.model, ProbeTree.of(walk.model)

    def measure(exact: bool) -> _Verdict:
        hidden, head, factor, theirs = _own_results(model, probe)
        verdict = training or _head_verdict(walk, probe.ids, exact, hidden, head, factor, theirs)
        if problem := _tree_problem(walk, probe, verdict, factor, theirs):
            again = theirs if training is None else _own_logits(model, probe.ids, factor)
            gap = _gap(model, theirs.log_softmax(-1), again.log_softmax(-1))
            if gap > max(_TOLERANCE, _ROUNDINGS * verdict.rounding):
                draws = f"draws at random in training mode (log-probs of two equal calls differ by {gap:.3g} nats)"
                raise _refusal(model, f"{draws}{_ONE_DRAW}look for draws in its code or its hooks, such as NEFTune's")
            raise _refusal(model, problem + _NOT_SCORED + (" in training mode" if training else ""))
        return verdict

    return _run_probe(walk, measure, repeated, training=training is not None)


def _head_verdict(
    walk: ModelWalk, ids: Tensor, exact: bool, hidden: Tensor, head: Head, factor: float, theirs: Tensor
) -> _Verdict:
    model = walk.model
    alone = torch.cat([_own_logits(model, row[None], factor) for row in ids[:2]])
    linear = functional.linear(hidden.to(head.weight) * factor, head.weight, head.bias).float()
    if linear.shape != theirs[:2].shape:
        raise _refusal(model, f"gives logits of shape {tuple(theirs[:2].shape)}, its head {tuple(linear.shape)}")
    truth = theirs[:2].log_softmax(-1)
    ways = [alone] if exact else [alone, _rounded_logits(walk, ids, factor)[:2]]
    rounding = max(_gap(model, truth, way.log_softmax(-1)) for way in ways)
    gaps = {
        transform: _gap(model, Head(head.weight, head.bias, *transform).transformed(linear).log_softmax(-1), truth)
        for transform in _transforms(model)
    }
    best = min(gaps, key=lambda transform: gaps[transform])
    if not gaps[best] <= max(_TOLERANCE, _ROUNDINGS * rounding):
        raise NotImplementedError(
            f"model: the logits of {type(model).__name__} are not its head's output, as scaled and capped by its "
            f"configuration (log-probs differ by {gaps[best]:.3g} nats){_BY_ITS_HEAD}"
        )
    return _Verdict(*best, rounding)


def _check_routers(walk: ModelWalk, repeated: Mapping[nn.Module, nn.Module]) -> None:
    model, probe = walk.model, ProbeTree.of(walk.model)

    def measure(_: bool) -> None:
        routers, gap = list[tuple[Tensor, ...]](), math.inf
        try:
            theirs = _own_output(model, probe.ids, output_router_logits=True).aux_loss
            with tree_training_mode(walk):
                packed_hidden(walk, probe.pack, routers=routers)
            ours = packed_router_loss(model, [(routers.pop(), uses_of_rows(probe.pack, probe.ids.cpu().numpy()))])
            gap = _gap(model, ours, theirs.to(ours)) / theirs.item()
            reason = f"its own forward gives one that differs by {gap:.0%}"
        except Exception as error:  # anything that a model's own code raises
            if is_out_of_memory(error):
                raise
            reason = f"{type(error).__name__}: {error}"
        if not gap <= _ROUTER_SHARE:
            what = f"the loss of its routers is not transformers' load_balancing_loss_func of their logits ({reason})"
            raise NotImplementedError(
                f"model: {type(model).__name__}: {what}, so packed trees cannot have it; train without "
                "(router_aux_loss_coef=0.0 in TRL)"
            )

    _run_probe(walk, measure, repeated)


def _own_results(model: PreTrainedModel, probe: "ProbeTree") -> tuple[Tensor, Head, float, Tensor]:
    """Return two rows' last states, the head, the model's own logits, and the factor of the head's input in them."""
    hidden, head = _own_output(model, probe.ids[:2], backbone(model)).last_hidden_state, read_head(model)
    if (width := hidden.shape[-1]) != (wanted := head.weight.shape[-1]):
        between = f"a layer between its body, {width} wide, and its head, {wanted} wide"
        raise _refusal(model, f"has {between}{_BY_ITS_HEAD}")
    largest = functional.linear(hidden.to(head.weight), head.weight, head.bias).abs().max().item()
    # So an untrained model's logits show a cap and effects of tokens.
    factor = max(1.0, _LARGE / largest) if largest > 0 else 1.0
    return hidden, head, factor, _own_logits(model, probe.ids, factor)


def _tree_problem(walk: ModelWalk, probe: "ProbeTree", verdict: _Verdict, factor: float, theirs: Tensor) -> str | None:
    model, head = walk.model, read_head(walk.model)
    head = replace(head, weight=head.weight * factor, softcap=verdict.softcap, logit_scale=verdict.scale)
    try:
        with tree_training_mode(walk):
            ours = head.logprobs(*pack_states(walk, head, probe.pack))
    except NotImplementedError as error:
        own = str(error) if str(error).startswith("model:") else f"model: {type(model).__name__}: {error}"
        raise NotImplementedError(own + _NOT_SCORED) from error
    except Exception as error:  # anything that a model's own code raises on a sequence that it does not expect
        if is_out_of_memory(error):
            raise
        what = f"cannot run on a packed tree ({type(error).__name__}: {error})"
        raise _refusal(model, what + _NOT_SCORED) from error
    truth = theirs[:, probe.first :].log_softmax(-1).gather(-1, probe.targets.to(theirs.device)[..., None])[..., 0]
    # A tree can get wrong how earlier tokens change later ones, which is little in an untrained model.
    tokens, targets = probe.ids[:, probe.first :], probe.targets
    same = ((tokens == tokens[:1]) & (targets == targets[:1])).to(truth.device)
    mixing = torch.where(same, truth - truth[:1], 0.0).abs().max().item()
    ours = ours[torch.from_numpy(probe.pack.query_index).to(ours.device)].view_as(probe.targets)
    gap = _gap(model, ours.to(truth), truth)
    if gap <= max(min(_TOLERANCE, _SHARE * mixing), _ROUNDINGS * verdict.rounding, FLOAT32_NOISE):
        return None
    differs = f"does not compute the same in a packed tree as by itself (log-probs differ by {gap:.3g} nats)"
    return differs + _other_mixers(walk)


def _transforms(model: PreTrainedModel) -> list[tuple[float | None, float]]:
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


def _other_mixers(walk: ModelWalk) -> str:
    for own, function in own_attention(walk).items():
        plain = "which is not transformers' own; call set_attn_implementation('sdpa') for plain attention"
        return f": its attention {own!r} runs {function!r}, {plain}"
    config = walk.model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    others = sorted({str(kind) for kind in kinds if "linear" in str(kind) or "attention" not in str(kind)})
    states = f": its {' and '.join(others)} layers carry a state that several tokens of a branch cannot take up"
    return states if others else ""


class ProbeTree(NamedTuple):
    """A row and branches that leave it and return, as a batch on the model's device and as one pack."""

    ids: Tensor  # (n, L)
    first: int  # position of the first token whose successor is a target
    targets: Tensor  # (n, L - first)
    pack: Pack

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ProbeTree":
        """Make a probe with a branch of a branch, two branches one token apart, and one at a last token."""
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
        queries = [Query(row[:-1], first, row[first + 1 :]) for row in rows]
        (pack,) = lay_out(queries, [range(len(rows))], _LENGTH * len(rows))
        batch = torch.from_numpy(np.stack(rows)).to(input_device(model))
        return cls(batch[:, :-1].contiguous(), first, batch[:, first + 1 :], pack)


def _own_logits(model: PreTrainedModel, ids: Tensor, factor: float) -> Tensor:
    head = model.get_output_embeddings()
    with head.register_forward_pre_hook(lambda _, args: (args[0] * factor, *args[1:])):
        logits: Tensor = _own_output(model, ids).logits.float()
    if torch.isnan(logits).any():
        raise FloatingPointError(f"model: {type(model).__name__} gives nan logits on an ordinary row of tokens")
    return logits


def _rounded_logits(walk: ModelWalk, ids: Tensor, factor: float) -> Tensor:
    def shift(_: nn.Module, __: object, out: Tensor) -> Tensor:  # each number to a neighbour, up and down by turns
        dtype = out.dtype if out.dtype in HALVES else product_dtype(walk)
        signs = 1 - 2 * (torch.arange(out.numel(), device=out.device) % 2).view_as(out)
        return (out.float() * (1 + torch.finfo(dtype).eps * signs)).to(out.dtype)

    with walk.model.get_input_embeddings().register_forward_hook(shift):
        return _own_logits(walk.model, ids, factor)


def _own_output(model: PreTrainedModel, ids: Tensor, body: nn.Module | None = None, **options: Any) -> Any:
    run: Callable[..., Any] = model if body is None else body
    if (ranks := inside(model)) is not None:
        ranks.before_forward()
        run = model.forward if body is None else body  # without the hooks of its wrapper, which would start it again
    return run(input_ids=ids, use_cache=False, **options)


def _gap(model: PreTrainedModel, ours: Tensor, theirs: Tensor) -> float:
    # A token excluded in both has no gap.
    gap = torch.where(ours == theirs, 0.0, ours - theirs).abs().max().nan_to_num(math.inf).item()
    return gap if (ranks := inside(model)) is None else ranks.largest(gap)


def _run_probe(
    walk: ModelWalk, measure: Callable[[bool], _Result], repeated: Mapping[nn.Module, nn.Module], training: bool = False
) -> _Result:
    """Run `measure(exact)` with the model prepared for a probe: in float32 if possible, else in its own dtype."""
    model = walk.model
    with ExitStack() as stack:
        if training:
            devices = {parameter.device for parameter in walk.parameters() if parameter.device.type == "cuda"}
            stack.enter_context(torch.random.fork_rng(list(devices)))
            stack.enter_context(torch.no_grad())
        else:
            stack.enter_context(evaluation_mode(walk))
        if model._can_set_attn_implementation() and not own_attention(walk):
            stack.enter_context(attention_implementation(walk, "eager"))
        for context in (
            layers_skipped(repeated), value_of(EAGER, True), ieee_products(), without_accelerates_autocast(model),
            torch.autocast(input_device(model).type, enabled=False),
        ):  # fmt: skip
            stack.enter_context(context)
        if isinstance(inside(model), Ranks):
            stack.enter_context(without_casts(model))
            return measure(False)
        is_wider = False
        try:
            with float32_weights(walk, repeated) as is_wider:
                return measure(True)
        except (NotImplementedError, FloatingPointError):
            raise
        except Exception as error:  # a kernel for halves only, or no memory for float32
            if not (is_wider or is_out_of_memory(error)):
                raise
        return measure(False)
