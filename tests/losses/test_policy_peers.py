"""The losses against Liger's chunked loss, where Liger takes weights rightly, and against verl's vanilla loss."""

import pytest
import torch
from torch import Tensor

from cfa_kernels.losses.policy import linear_policy_loss, policy_loss

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


def verl_vanilla(
    old: Tensor, logprobs: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor, *, aggregation: str
) -> Tensor:
    """verl 0.9's `vanilla` policy loss with dual clip and `rollout_is_weights`, then its `agg_loss`, restated."""
    ratio = (logprobs - old).clamp(-20, 20).exp()
    worse = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - 0.2, 1 + 0.28))
    dual = torch.minimum(-advantages * 3.0, worse)
    losses = torch.where(advantages < 0, dual, worse) * weights * mask
    per_sequence = losses.sum(-1)
    if aggregation == "token-mean":
        return losses.sum() / mask.sum()
    if aggregation == "seq-mean-token-sum":
        return per_sequence.mean()
    return (per_sequence / mask.sum(-1)).mean()  # seq-mean-token-mean


@pytest.mark.parametrize(
    ("aggregation", "loss_type"),
    [("token-mean", "dapo"), ("token-mean", "bnpo"), ("seq-mean-token-sum", "luspo"), ("seq-mean-token-mean", "grpo")],
)
def test_loss_and_gradient_equal_verls_vanilla_loss_with_its_dual_clip_as_delta(aggregation, loss_type):
    data = {name: t.double() if t.is_floating_point() else t for name, t in tokens().items()}
    data["old"][1, 0] = data["logprobs"][1, 0] - 2.0  # a negative advantage beyond the dual clip, exp(2) > 3
    advantages = data["advantages"][:, None].expand(B, T)
    theirs, ours = (data["logprobs"].clone().requires_grad_() for _ in range(2))
    expected = verl_vanilla(data["old"], theirs, advantages, data["mask"], data["weights"], aggregation=aggregation)
    expected.backward()
    loss, _ = policy_loss(
        ours,
        data["old"],
        advantages,
        data["mask"],
        weights=data["weights"],
        delta=3.0,
        loss_type=loss_type,
    )
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    assert ours.grad[1, 0] == 0
