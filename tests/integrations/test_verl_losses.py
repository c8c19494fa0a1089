"""verl's own losses with weights in the advantages, and ours next to them; `test_policy_trl.py` compares with TRL's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cfa_kernels import fold_weights, policy_loss

pytest.importorskip("verl.workers.utils.losses", reason="verl is not installed", exc_type=ImportError)

from tensordict import TensorDict
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss

from cfa_kernels.integrations.verl import INEXACT_LOSSES

pytestmark = pytest.mark.slow

B, T = 6, 7
DUAL_CLIP = 1.6
AGGREGATED = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KINDS = [("vanilla", mode) for mode in AGGREGATED]
KINDS += [(name, "token-mean") for name in ("dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "cispo")]


@pytest.fixture
def tokens() -> Any:
    """Off-policy tokens in float64 whose ratios fall on both sides of every clip, with ragged masks."""
    g = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    mask = (torch.arange(T) < torch.tensor([7, 3, 5, 6, 1, 4])[:, None]).long()
    mask[0, 2] = 0  # a tool's token inside the completion
    logprobs = -normal(B, T).abs() - 0.1
    weights = 4 * torch.rand(B, T, generator=g, dtype=torch.float64) * (torch.rand(B, T, generator=g) > 0.2)
    return SimpleNamespace(
        logprobs=logprobs, old=logprobs + 0.5 * normal(B, T), ref=logprobs + 0.3 * normal(B, T), mask=mask,
        advantages=torch.tensor([1.3, -0.7, 0.4, -2.0, 0.0, 0.9], dtype=torch.float64)[:, None].expand(B, T),
        weights=weights, lengths=(mask.cumsum(1).argmax(1) + 1).tolist(),
    )  # fmt: skip


def verls(
    kind: tuple[str, str], t: Any, advantages: Tensor, weights: Tensor | None = None, beta: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Loss of verl's `ppo_loss` and its gradient by log-probs; `weights` go into verl's slot after the clip."""
    name, mode = kind
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_high=0.28, clip_ratio_c=DUAL_CLIP,
        loss_agg_mode=mode, use_kl_loss=beta != 0, kl_loss_coef=beta,
    )  # fmt: skip
    choices = {"loss_mode": name, "dro_beta": 0.5, "clip_cov_ratio": 0.3, "clip_cov_lb": -9.0, "kl_cov_ratio": 0.3}
    for option, value in choices.items():
        object.__setattr__(config.policy_loss, option, value)

    def nested(values: Tensor) -> Tensor:
        rows = [row[:n] for row, n in zip(values, t.lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    columns = {
        "responses": torch.zeros_like(t.mask), "response_mask": t.mask, "old_log_probs": t.old,
        "advantages": advantages, "ref_log_prob": t.ref, "rollout_is_weights": weights,
    }  # fmt: skip
    data = {name: nested(column) for name, column in columns.items() if column is not None}
    data["prompts"] = torch.nested.as_nested_tensor([torch.zeros(1).long()] * B, layout=torch.jagged)
    data = TensorDict(data, batch_size=B)
    totals = {"dp_size": 1, "batch_num_tokens": int(t.mask.sum()), "global_batch_size": B}
    tensordict_utils.assign_non_tensor(data, **totals)
    logprobs = t.logprobs.clone().requires_grad_()
    # A model gives the log-prob of the next token at each position, and one of nothing at the last.
    rows = [torch.cat([row[:n], row.new_zeros(1)]) for row, n in zip(logprobs, t.lengths, strict=True)]
    loss, _ = ppo_loss(config, {"log_probs": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, data)
    loss.backward()
    return loss.detach(), logprobs.grad


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_weights_in_the_advantages_equal_weights_on_the_clipped_loss(kind, tokens, beta):
    folded = verls(kind, tokens, fold_weights(tokens.advantages, tokens.weights), beta=beta)
    weighted = verls(kind, tokens, tokens.advantages, tokens.weights, beta=beta)
    torch.testing.assert_close(folded, weighted, rtol=1e-7, atol=1e-9)  # verl adds 1e-8 to its denominators
    assert not torch.allclose(folded[1], verls(kind, tokens, tokens.advantages, beta=beta)[1], rtol=1e-3)


def weighs_tokens(name: str, tokens: Any) -> bool:
    """Whether weights in the advantages multiply each token's own gradient, as credit needs."""
    torch.manual_seed(0)  # of `clip_cov`
    weighed = verls((name, "token-mean"), tokens, fold_weights(tokens.advantages, tokens.weights))[1]
    torch.manual_seed(0)
    plain = verls((name, "token-mean"), tokens, tokens.advantages)[1]
    return torch.allclose(weighed, plain * tokens.weights, rtol=1e-7, atol=1e-12)


def test_losses_of_verl_that_are_refused_with_credit_are_those_where_its_weights_are_no_factors(tokens):
    wrong = [name for name in POLICY_LOSS_REGISTRY if not weighs_tokens(name, tokens)]
    assert sorted(wrong) == sorted(INEXACT_LOSSES)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vanilla", {"delta": DUAL_CLIP}), ("cispo", {"loss_type": "cispo_two_sided"}),
        ("dppo_tv", {"loss_type": "dppo", "delta": DUAL_CLIP}),
        ("geo_mean", {"loss_type": "gmpo", "importance_sampling_level": "sequence"}),
        ("gpg", {"loss_type": "reinforce"}), ("gspo", {"importance_sampling_level": "sequence_token"}),
        ("sapo", {"loss_type": "sapo"}),
    ],
)  # fmt: skip
def test_our_losses_have_the_gradients_of_verl_s(tokens, name, options):
    logprobs = tokens.logprobs.clone().requires_grad_()
    tokens.old = tokens.old.where(tokens.old < 0, -0.01)  # a probability, by which `dppo_tv` judges
    policy_loss(logprobs, tokens.old, tokens.advantages[:, 0], tokens.mask, **options)[0].backward()
    theirs = verls((name, "token-mean"), tokens, tokens.advantages)[1]
    torch.testing.assert_close(logprobs.grad, theirs, rtol=1e-6, atol=1e-8)
