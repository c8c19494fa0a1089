"""Figures of the losses: each is a mean, least or largest of what is there, and nan where nothing is."""

import math

import pytest
import torch

from cfa_kernels.loss.policy import contributing_rows, linear_policy_loss, logits_policy_loss, policy_loss
from tests.support.policy_problem import KINDS

B, T, V = 4, 5, 11
LENGTHS = [5, 3, 4, 2]
KIND = pytest.mark.parametrize(("loss_type", "level"), KINDS)
MODES = {"token": "token_truncate", "sequence": "sequence_mask"}
OVER_ALL = {"kl", "entropy", "cispo_clip_ratio"} | {
    f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max")
}
"""Figures over all counted tokens; the others are over those with a weighted advantage."""


def problem(**changes):
    """Log-ratios of up to 1 nat, so that every clip bites, and sampling log-probs of another policy."""
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(B, T, V, generator=g, dtype=torch.float64)
    targets = torch.randint(V, (B, T), generator=g)
    logprobs = logits.log_softmax(-1).gather(2, targets[..., None])[..., 0]
    advantages = torch.tensor([1.0, -0.7, 0.4, -1.3], dtype=torch.float64)
    made = {
        "logits": logits, "targets": targets, "logprobs": logprobs,
        "old": logprobs - 0.5 * advantages.sign()[:, None] + torch.rand(B, T, generator=g, dtype=torch.float64) - 0.5,
        "advantages": advantages,
        "mask": torch.arange(T) < torch.tensor(LENGTHS)[:, None],
        "weights": torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=torch.float64)[:, None].expand(B, T).contiguous(),
        "sampling": logprobs + 0.3 * torch.randn(B, T, generator=g, dtype=torch.float64),
    }  # fmt: skip
    return made | changes


def figures(made, loss_type, level, rows=slice(None), *, on_policy=False):
    """Metrics of some rows by each of the three losses, which must agree."""
    p = {name: tensor[rows] for name, tensor in made.items()}
    kind = "sequence" if level == "sequence" and loss_type != "vespo" else "token"
    options = {
        "loss_type": loss_type, "importance_sampling_level": level, "max_completion_length": T,
        "weights": p["weights"], "sampling_logprobs": p["sampling"], "sampling_mode": MODES[kind],
        "sampling_clip_max": 1.5, "num_items_in_batch": 14, "num_sequences_in_batch": B,
    }  # fmt: skip
    old = None if on_policy else p["old"]
    columns = (old, p["advantages"], p["mask"])
    alike = [
        policy_loss(p["logprobs"], *columns, **options)[1],
        logits_policy_loss(p["logits"], p["targets"], *columns, backend="torch", **options)[1],
    ]
    joined = kind == "sequence" or loss_type == "vespo"
    some = contributing_rows(
        p["mask"], p["advantages"], weights=p["weights"], importance_sampling_level=level, whole_rows=joined
    )  # fmt: skip
    eye = torch.eye(V, dtype=torch.float64)
    hidden = p["logits"].flatten(0, 1)[some]
    alike.append(linear_policy_loss(hidden, eye, p["targets"], *columns, rows=some, backend="torch", **options)[1])
    for other in alike[1:]:
        torch.testing.assert_close(other, alike[0], rtol=1e-9, atol=1e-12, equal_nan=True)
    return {name: value.item() for name, value in alike[0].items()}


@KIND
def test_a_batch_without_an_advantage_has_no_figures_of_tokens_that_move_the_loss(loss_type, level):
    for name, nothing, on_policy in (("advantages", torch.zeros(B), False), ("weights", torch.zeros(B, T), True)):
        found = figures(problem(**{name: nothing.double()}), loss_type, level, on_policy=on_policy)
        assert all(math.isnan(value) for name, value in found.items() if name not in OVER_ALL), found
        assert all(value == 0 for name, value in found.items() if name in OVER_ALL), found
        assert "sampling/importance_sampling_ratio/min" in found


@KIND
@pytest.mark.parametrize("change", ["advantages", "weights"])
def test_rows_that_do_not_move_the_loss_change_no_figure_of_those_that_do(loss_type, level, change):
    made, moving = problem(), [0, 3]
    made[change] = made[change].clone()
    made[change][[1, 2]] = 0
    found, alone = figures(made, loss_type, level), figures(made, loss_type, level, moving)
    tokens, of_moving = sum(LENGTHS), LENGTHS[0] + LENGTHS[3]
    by_token = level == "token" or loss_type == "gmpo"
    share = of_moving / tokens if by_token else 2 / B
    for name, value in found.items():
        if (name.endswith("_mean") and "clip" in name) or name == "cispo_clip_ratio":
            assert value == pytest.approx(alone[name] * share), name
        elif name == "clip_ratio/low_min":
            assert value == 0
        else:
            assert value == pytest.approx(alone[name]), name
    assert any(value > 0 for name, value in found.items() if "clip" in name) or loss_type not in ("dapo", "gmpo")


def test_a_token_of_weight_0_is_not_counted_as_clipped_wherever_it_is_in_its_row():
    made = problem(old=problem()["logprobs"] - 1)  # all above the clip
    made["advantages"] = torch.ones(B, dtype=torch.float64)
    made["weights"] = (torch.arange(T) != 1).double().expand(B, T).contiguous()
    expected = (sum(LENGTHS) - B) / sum(LENGTHS)
    for loss_type, level in (("gmpo", "sequence_token"), ("dapo", "token"), ("dapo", "sequence_token")):
        columns = (made["old"], made["advantages"], made["mask"])
        options = {"weights": made["weights"], "loss_type": loss_type, "importance_sampling_level": level}
        _, metrics = policy_loss(made["logprobs"], *columns, **options)
        share = expected if level == "token" or loss_type == "gmpo" else sum((n - 1) / n for n in LENGTHS) / B
        assert metrics["clip_ratio/high_mean"].item() == pytest.approx(share), (loss_type, level)


def test_the_mean_of_halves_entropies_is_not_rounded_to_halves():
    shape, values = (2, 600), (torch.rand(2, 600) + 0.01).bfloat16()
    _, metrics = policy_loss(torch.zeros(shape), None, torch.ones(2), torch.ones(shape), entropies=values)
    assert metrics["entropy"].item() == pytest.approx(values.float().mean().item(), rel=1e-6)
