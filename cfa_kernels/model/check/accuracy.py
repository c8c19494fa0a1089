"""Accuracy of log-probs from a packed tree."""

import torch

from ...ops.row_softmax import FLOAT32_NOISE

ACCURACY: dict[torch.dtype, float] = {
    torch.float64: FLOAT32_NOISE,  # scores are float32
    torch.float32: FLOAT32_NOISE,
    torch.float16: 0.015,
    torch.bfloat16: 0.1,
}
"""Nats per answer token by which rounding may move a score of a model that computes in a dtype."""
