"""Accuracy of log-probs from a packed tree: by dtype, or measured for one model."""

import torch
from torch import nn

from ...ops.row_softmax import FLOAT32_NOISE
from ..parts import causal_lm
from ..tree_forward import pack_states, tree_attention_mode
from .probe_mode import small_windows
from .verify import ProbeTree, check_supported, own_output, run_probe

ACCURACY: dict[torch.dtype, float] = {
    torch.float64: FLOAT32_NOISE,  # scores are float32
    torch.float32: FLOAT32_NOISE,
    torch.float16: 0.015,
    torch.bfloat16: 0.1,
}
"""Nats per answer token by which rounding may move a score of a model that computes in a dtype."""

_DEVIATIONS = 3  # root mean squares of rounding errors that cover nearly all of them


def noise_floor(model: nn.Module) -> float:
    """Measure by how many nats per token rounding may move log-probs of one model from a packed tree.

    Three times the root mean square difference, over the tokens of a probe, between a packed tree in the arithmetic
    that the model runs in now (its dtype, the caller's autocast and TF32) and the model by itself in float32, or in its
    own dtype if it has quantised layers; at least `FLOAT32_NOISE`. Takes one forward each way, at every call.

    Args:
        model: a transformers causal model, or a wrapper of one.

    Raises:
        NotImplementedError: as `check_supported`.
    """
    causal = causal_lm(model)
    head, probe = check_supported(causal), ProbeTree.of(causal)
    with small_windows(causal), tree_attention_mode(causal):
        ours = probe.unpacked(head.logprobs(*pack_states(causal, head, probe.pack)))

    def truth() -> torch.Tensor:
        return probe.target_logprobs(own_output(causal, probe.ids).logits.float())

    theirs = run_probe(causal, truth, moved=False)
    rounding = torch.where(ours == theirs, 0.0, ours - theirs).square().mean().sqrt().item()
    return max(FLOAT32_NOISE, _DEVIATIONS * rounding)
