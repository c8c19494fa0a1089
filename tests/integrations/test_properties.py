"""What a drop-in must show with the own losses of verl; `test_policy_trl.py` compares with TRL's."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cfa_kernels import fold_weights, policy_loss

pytestmark = pytest.mark.slow

B, T = 6, 7
BETA = 0.1
DUAL_CLIP = 1.6


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
        totals={"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}, logprobs=logprobs,
        old=logprobs + 0.5 * normal(B, T), ref=logprobs + 0.3 * normal(B, T), sampled=logprobs + 0.4 * normal(B, T),
        advantages=torch.tensor([1.3, -0.7, 0.4, -2.0, 0.0, 0.9], dtype=torch.float64), mask=mask, weights=weights,
    )  # fmt: skip


class Verl:
    """verl's own `ppo_loss` with the policy losses in its registry."""

    modes = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    kinds = tuple(("vanilla", mode) for mode in modes) + tuple(
        (name, "token-mean") for name in ("dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "cispo")
    )

    def __init__(self) -> None:
        pytest.importorskip("verl.workers.utils.losses", reason="verl is not installed", exc_type=ImportError)
        from verl.workers.config import ActorConfig
        from verl.workers.utils.losses import ppo_loss

        self.config, self.loss = ActorConfig, ppo_loss

    def stock(self, kind: Any, t: Any, advantages: Tensor, beta: float, logprobs: Tensor) -> Tensor:
        columns = advantages if advantages.dim() == 2 else advantages[:, None].expand(t.mask.shape)
        return self.run(kind, t, columns, None, beta, logprobs)

    def ours(self, kind: Any, t: Any, weights: Tensor | None, beta: float, logprobs: Tensor) -> Tensor:
        """verl's own slot for weights after the clip."""
        columns = t.advantages[:, None].expand(t.mask.shape)
        return self.run(kind, t, columns, weights, beta, logprobs)

    def run(self, kind: Any, t: Any, advantages: Any, weights: Any, beta: float, logprobs: Any) -> Any:
        from tensordict import TensorDict
        from verl.utils import tensordict_utils

        name, mode = kind
        config = self.config(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_high=0.28, clip_ratio_c=DUAL_CLIP,
            loss_agg_mode=mode, use_kl_loss=beta != 0, kl_loss_coef=beta,
        )  # fmt: skip
        choices = {"loss_mode": name, "dro_beta": 0.5, "clip_cov_ratio": 0.3, "clip_cov_lb": -9.0, "kl_cov_ratio": 0.3}
        for option, value in choices.items():
            object.__setattr__(config.policy_loss, option, value)
        lengths = (t.mask.cumsum(1).argmax(1) + 1).tolist()

        def nested(values: Tensor) -> Tensor:
            return torch.nested.as_nested_tensor(
                [row[:n] for row, n in zip(values, lengths, strict=True)], layout=torch.jagged
            )

        prompt = torch.nested.as_nested_tensor([torch.zeros(1).long()] * len(lengths), layout=torch.jagged)
        data = {
            "prompts": prompt, "responses": nested(torch.zeros_like(t.mask)), "response_mask": nested(t.mask),
            "old_log_probs": nested(t.old), "advantages": nested(advantages), "ref_log_prob": nested(t.ref),
        }  # fmt: skip
        if weights is not None:
            data["rollout_is_weights"] = nested(weights)
        data = TensorDict(data, batch_size=len(lengths))
        tensordict_utils.assign_non_tensor(data, **t.totals)
        # A model gives the log-prob of the next token at each position, and one of nothing at the last.
        rows = [torch.cat([row[:n], row.new_zeros(1)]) for row, n in zip(logprobs, lengths, strict=True)]
        output = {"log_probs": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}
        loss, _ = self.loss(config, output, data)
        return loss / (t.mask.sum() if mode == "token-sum" else 1)


trainers = functools.cache(lambda cls: cls())


@pytest.fixture
def host(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A trainer and one of its losses."""
    cls, kind = request.param
    return trainers(cls), kind


every_loss = pytest.mark.parametrize(
    "host",
    [pytest.param((Verl, kind), id="-".join(kind)) for kind in Verl.kinds],
    indirect=True,
)


def loss_and_gradient(of: str, host: Any, tokens: Any, factors: Tensor | None, *, beta: float = 0.0) -> Any:
    """Loss and gradient by log-probs: of the trainer's own code by advantages, or of ours by weights."""
    trainer, kind = host
    logprobs = tokens.logprobs.clone().requires_grad_()
    loss = getattr(trainer, of)(kind, tokens, factors, beta, logprobs)
    loss.backward()
    return loss.detach(), logprobs.grad


stock, ours = (functools.partial(loss_and_gradient, of) for of in ("stock", "ours"))


@every_loss
@pytest.mark.parametrize("beta", [0.0, BETA])
def test_weights_in_the_advantages_equal_weights_on_the_clipped_loss(host, tokens, beta):
    folded = stock(host, tokens, fold_weights(tokens.advantages, tokens.weights), beta=beta)
    weighted = ours(host, tokens, tokens.weights, beta=beta)
    torch.testing.assert_close(folded, weighted, rtol=1e-7, atol=1e-9)  # one trainer adds 1e-8 to its denominators
    assert not torch.allclose(folded[1], stock(host, tokens, tokens.advantages, beta=beta)[1], rtol=1e-3)


def weighs_tokens(host: Any, tokens: Any) -> bool:
    """Whether weights in the advantages multiply each token's own gradient, as credit needs."""
    torch.manual_seed(0)  # of `clip_cov`
    weighed = stock(host, tokens, fold_weights(tokens.advantages, tokens.weights))[1]
    torch.manual_seed(0)
    return torch.allclose(weighed, stock(host, tokens, tokens.advantages)[1] * tokens.weights, rtol=1e-7, atol=1e-12)


def test_losses_of_verl_that_are_refused_with_credit_are_those_where_its_weights_are_no_factors(tokens):
    """Of every loss that verl has registered."""
    trainer = trainers(Verl)
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    from cfa_kernels.integrations.verl import INEXACT_LOSSES

    wrong = [name for name in POLICY_LOSS_REGISTRY if not weighs_tokens((trainer, (name, "token-mean")), tokens)]
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
    policy_loss(logprobs, tokens.old, tokens.advantages, tokens.mask, **options)[0].backward()
    theirs = stock((trainers(Verl), (name, "token-mean")), tokens, tokens.advantages)[1]
    torch.testing.assert_close(logprobs.grad, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("value", [-0.5, float("nan"), float("inf")])
def test_weights_that_are_negative_or_not_finite_are_refused_by_row_and_token(tokens, value):
    tokens.weights[3, 1] = value
    with pytest.raises(ValueError, match=rf"weights row 3, token 1: must be finite and not negative, got {value}"):
        fold_weights(tokens.advantages, tokens.weights)
