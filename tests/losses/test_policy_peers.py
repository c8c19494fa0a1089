"""The losses against Liger's chunked loss, where Liger takes weights rightly."""

import pytest
import torch
from torch import Tensor

from cfa_kernels.losses.policy import linear_policy_loss

B, T, V, H = 4, 6, 31, 16


def tokens() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(B, T, H, generator=g), torch.randn(V, H, generator=g) / 2
    targets = torch.randint(V, (B, T), generator=g)
    logprobs = (hidden @ head.T).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return {
        "hidden": hidden,
        "head": head,
        "targets": targets,
        "logprobs": logprobs,
        "old": logprobs + 0.4 * torch.randn(B, T, generator=g),
        "ref": logprobs + 0.3 * torch.randn(B, T, generator=g),
        "advantages": torch.tensor([1.2, -0.7, 0.4, -1.5]),
        "mask": (torch.arange(T) < torch.tensor([6, 2, 5, 3])[:, None]).long(),
        "weights": 3 * torch.rand(B, T, generator=g),
    }


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize(
    "options", [{}, {"beta": 0.1, "use_bias_correction_kl": True, "delta": 1.5, "temperature": 0.7}]
)
def test_weights_equal_ligers_per_token_slot(loss_type, level, options):
    chunked = pytest.importorskip("liger_kernel.chunked_loss", reason="Liger is not installed")
    data = tokens()
    beta = options.get("beta", 0.0)
    liger = chunked.LigerFusedLinearGRPOLoss(
        compiled=False,
        use_ref_model=beta != 0,
        epsilon_low=0.2,
        epsilon_high=0.28,
        loss_type=loss_type,
        max_completion_length=8,
        importance_sampling_level=level,
        **{"beta": 0.0, **options},
    )
    theirs = [data[name].clone().requires_grad_() for name in ("hidden", "head")]
    expected, _ = liger(
        theirs[0],
        theirs[1],
        data["targets"],
        data["mask"],
        data["advantages"],
        ref_per_token_logps=data["ref"] if beta else None,
        old_per_token_logps=data["old"],
        vllm_is_ratio=data["weights"],
    )
    expected.backward()
    ours = [data[name].clone().requires_grad_() for name in ("hidden", "head")]
    loss, metrics = linear_policy_loss(
        *ours,
        data["targets"],
        data["old"],
        data["advantages"],
        data["mask"],
        weights=data["weights"],
        ref_logprobs=data["ref"] if beta else None,
        loss_type=loss_type,
        importance_sampling_level=level,
        max_completion_length=8,
        chunk_size=5,
        validate=False,  # weights differ at the sequence level too
        **options,
    )
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=2e-5, atol=1e-6)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=2e-6)
    assert 0 < metrics["clip_ratio/region_mean"] < 1
