"""Say how far rounding moves log-probs from a packed tree: by dtype, or measured."""

import weakref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..ops.matmul import float32_precision
from ..ops.row_softmax import FLOAT32_NOISE
from .head import Head
from .model import causal_lm, computation, input_device
from .probe_mode import small_windows
from .tree_forward import pack_states, tree_attention_mode
from .verify import Probe, check_supported, run_probe, whole_model

ACCURACY: dict[torch.dtype, float] = {
    torch.float64: FLOAT32_NOISE,  # scores are float32
    torch.float32: FLOAT32_NOISE,
    torch.float16: 0.015,
    torch.bfloat16: 0.1,
}
"""Nats per answer token by which rounding may move a score of a model that computes in a dtype; `noise_floor` measures
the figure of one model."""

_DEVIATIONS = 3  # root mean squares of rounding errors that cover nearly all of them
_MEASURED: weakref.WeakKeyDictionary[PreTrainedModel, dict[object, float]] = weakref.WeakKeyDictionary()


def noise_floor(model: nn.Module) -> float:
    """Nats per token by which log-probs from a packed tree may differ from the truth by rounding only.

    Three times the root mean square, over the tokens of the probe, of the difference between a packed tree in the
    arithmetic that the model runs in now (its own dtype, the caller's autocast and TF32) and the model by itself in
    float32; at least `FLOAT32_NOISE`. Measured once per model and arithmetic, with the weights of that moment, and kept
    with the self-check; that takes one forward each way. Where the model cannot run in float32 (quantised layers),
    the model in its own dtype stands for the truth, and the figure is too small by what both ways round alike.

    Roundings of different tokens add like independent errors, and those of a likely token shrink with its distance
    from certainty, 1 - p <= -log p. So the log-prob L (<= 0) of an answer of n tokens has an error of up to

        max(noise_floor(model) * min(sqrt(n), -L), FLOAT32_NOISE)

    nats, and a drop (masked minus base, two such log-probs) up to the root of the sum of both squares, at most
    `sqrt(2 * n) * noise_floor(model)`. A drop, or a difference of two drops of one answer, below that tells nothing.

    Args:
        model: a transformers causal model, or what wraps one.

    Raises:
        NotImplementedError: as `check_supported`.
    """
    model = causal_lm(model)
    head = check_supported(model)
    noise, arithmetic = _MEASURED.setdefault(model, {}), (computation(model), *_arithmetic(model))
    if arithmetic not in noise:
        noise[arithmetic] = max(FLOAT32_NOISE, _DEVIATIONS * _rounding(model, head))
    return noise[arithmetic]


def _arithmetic(model: PreTrainedModel) -> tuple[object, ...]:
    kind = input_device(model).type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return model.dtype, kind, autocast, float32_precision()


def _rounding(model: PreTrainedModel, head: Head) -> float:
    """Measure the root mean square, over the probe's tokens, of rounding in log-probs from a packed tree, nats."""
    probe = Probe.of(model)

    def own() -> Tensor:
        return probe.of_targets(whole_model(model)(input_ids=probe.ids, use_cache=False).logits.float())

    with small_windows(model), tree_attention_mode(model):
        ours = probe.unpacked(head.logprobs(*pack_states(model, head, probe.pack)))
    truth = run_probe(model, own, moved=False)
    return torch.where(ours == truth, 0.0, ours - truth).square().mean().sqrt().item()
