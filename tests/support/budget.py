"""The error budget that low-precision results are held to."""

import torch
from torch import Tensor


def assert_within_budget(ours: Tensor, low_precision: Tensor, reference: Tensor, scale: float = 0.0) -> None:
    """`err(ours) <= 2 * (err(same maths in ours' precision) + eps * max|reference|)`, all outputs finite.

    `reference` is float64; `low_precision` is the plain PyTorch form run in the dtype under test. With `scale`, of what
    the outputs are a difference of, eps counts at least so much.
    """
    assert reference.dtype == torch.float64
    assert ours.shape == reference.shape
    assert torch.isfinite(ours).all()
    reference = reference.to(ours.device)
    eps = torch.finfo(ours.dtype).eps
    allowed = 2 * ((low_precision.double() - reference).abs().max() + eps * max(reference.abs().max(), scale))
    error = (ours.double() - reference).abs().max()
    assert error <= allowed, f"error {error.item():.3g} exceeds the budget {allowed.item():.3g}"
