"""Micro-batches: which rows are fed, and that their log-probs are those they were sampled with."""

import math
from dataclasses import replace

import pytest
import torch

from cfa_kernels.model.check.verify import check_supported
from cfa_kernels.scoring import packed as packed_loss
from tests.support.embedded import all_counted, sample, settings, updated
from tests.support.waits import a_device, put_on_device
from trainer.step import micro_batches


def test_rows_without_advantage_are_not_fed_unless_the_kl_term_needs_them(trainer, rollouts) -> None:
    def fed(config) -> list[list[int]]:
        return micro_batches(config, all_counted(rollouts), trainer.policy)

    assert fed(settings("--token_budget=100000")) == [[*range(8), *range(24, 32)]]
    assert fed(settings("--token_budget=1")) == [[*range(8)], [*range(24, 32)]]  # a group is never cut
    assert fed(settings("--token_budget=100000", "--beta=0.1")) == [[*range(32)]]


@pytest.mark.parametrize(
    ("credit", "before", "after"),  # of each micro-batch
    [
        (["--credit=none"], [], []), (["--credit=cf", "--spans.max_spans=1"], [], ["masked.py", *["assign.py"] * 2]),
        (["--credit=cf", "--spans.max_spans=1", "--weights=bilevel"], ["masked.py"], []),
    ],
)  # fmt: skip
def test_the_host_looks_once_before_a_step_and_at_scores_before_a_backward_only_where_a_rule_needs_it(
    fresh, rollouts, credit, before, after
):
    ratios = "--importance_sampling_clip_max=3"
    trainer = fresh("--no_use_peft", "--token_budget=1", ratios, *credit)
    with a_device() as waits:
        put_on_device(trainer.policy)
        trainer.optimizer = torch.optim.SGD(trainer.policy.parameters(), 1e-3)
        trainer.scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer)
        check_supported(trainer.policy)  # once a model, at set-up
        waits.seen.clear()
        updated(trainer, rollouts)
        seen = [where.split(" at ")[1].split(":")[0] for where in waits.seen]
    parts = micro_batches(trainer.config, all_counted(rollouts), trainer.policy)
    assert seen == [*before * len(parts), "step.py", *after * len(parts)], waits.seen
    assert len(parts) == 2


@pytest.mark.parametrize(("beta", "where"), [(0, "loss"), (1e-6, "forward")])
def test_a_micro_batch_without_memory_is_done_in_halves_to_the_same_update(fresh, rollouts, beta, where, monkeypatch):
    """Also where its credit has been assigned before memory runs out, which is then not assigned again."""
    trainer = fresh(f"--beta={beta}", "--token_budget=100000", "--max_grad_norm=1e9", "--spans.max_spans=1")
    trainer.optimizer = torch.optim.SGD(trainer.policy.parameters(), 0.0)

    def updated_by(most: int) -> tuple[torch.Tensor, dict[str, float], torch.Tensor, list[int]]:
        run, loss, sizes = packed_loss.packed_forward, packed_loss.PackedForward.policy_loss, list[int]()

        def checked(rows: int, here: str) -> None:
            if here == where:
                sizes.append(rows)
                if rows > most:
                    raise torch.OutOfMemoryError("pretend")

        def forward(causal, rows, **options):
            checked(len(rows), "forward")
            return run(causal, rows, **options)

        def policy_loss(self, *args, **options):
            checked(len(self.rows), "loss")
            return loss(self, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr("trainer.step.packed_forward", forward)
            patch.setattr(packed_loss.PackedForward, "policy_loss", policy_loss)
            credit, metrics = updated(trainer, rollouts)
        gradient = torch.cat([p.grad.flatten() for p in trainer.policy.parameters() if p.grad is not None])
        return gradient, metrics, credit.padded(), sizes

    expected, metrics, weights, whole = updated_by(1000)
    gradient, actual, same_weights, sizes = updated_by(8)
    halves = [32, 16, 8, 8, 16, 8, 8] if beta else [16, 8, 8]  # the KL term needs rows without advantage, too
    assert (whole, sizes) == (halves[:1], halves)
    assert (gradient - expected).norm() <= 1e-4 * expected.norm()
    assert (weights != 1).any()
    torch.testing.assert_close(same_weights, weights, rtol=0, atol=1e-4)
    assert actual["loss"] == pytest.approx(metrics["loss"], rel=1e-3, abs=1e-6)
    with pytest.raises(torch.OutOfMemoryError, match="pretend"):
        updated_by(7)  # a group is never cut


@pytest.fixture(scope="module")
def short(trainer):
    """32 completions of 4 problems that end after 20 tokens, for what needs no answer in them."""
    return sample(trainer, [0, 1, 2, 3], max_completion_length=20)


@pytest.mark.parametrize(
    ("level", "loss_type", "mode"),
    [
        ("token", "dapo", "token_truncate"),
        ("sequence", "dapo", "sequence_mask"),
        ("sequence_token", "gmpo", "geometric_mask"),
        ("token", "vespo", None),
    ],
)
def test_the_figures_of_several_micro_batches_are_those_of_one(fresh, short, level, loss_type, mode) -> None:
    """Two groups are mixed, and two have no advantage, so that the figures are means over other tokens in each."""
    gaps = [0.3 * (torch.arange(n) % 3 - 1) - 0.25 * (b % 2) for b, n in enumerate(short.rows.lengths)]
    sampled = [row + gap for row, gap in zip(short.logprobs, gaps, strict=True)]
    rollouts = replace(short, logprobs=sampled)
    correction = [] if mode is None else ["--importance_sampling_clip_max=1.2", f"--importance_sampling_mode={mode}"]
    actual = []
    for budget in (1, 100_000):
        trainer = fresh(
            f"--token_budget={budget}", "--beta=0.1", "--num_iterations=2", "--credit=none",
            f"--importance_sampling_level={level}", "--learning_rate=1e-3", f"--loss_type={loss_type}", *correction,
            "--max_sampling_gap=1000",
        )  # fmt: skip
        actual.append(updated(trainer, rollouts)[1])
    assert actual[0] == pytest.approx(actual[1], rel=2e-3, abs=1e-5)
    assert actual[1]["ratio_mean"] == pytest.approx(1, abs=0.2)
    assert all(math.isfinite(value) for value in actual[0].values())
    assert mode is None or actual[0]["sampling/importance_sampling_ratio/min"] < 1


def update_on_a_group(trainer) -> dict[str, float]:
    config = trainer.config
    rollouts = sample(trainer, [0], temperature=config.temperature, top_p=config.top_p, max_completion_length=20)
    return updated(trainer, rollouts)[1]


def test_the_update_is_over_the_ids_of_the_nucleus_and_no_run_goes_on_without_them(fresh) -> None:
    options = {"temperature": 1.0, "top_p": 0.8, "max_completion_length": 20}
    trainer = fresh("--dtype=float32", "--temperature=1", "--top_p=0.8")
    rollouts = sample(trainer, [0], **options)
    assert all(
        len(kept.offsets) == len(row) + 1 for kept, row in zip(rollouts.kept_tokens, rollouts.logprobs, strict=True)
    )
    assert all(row.max() <= 0 for row in rollouts.logprobs)
    with pytest.raises(FloatingPointError, match="their log-probs in the update are not those they were sampled with"):
        updated(trainer, replace(rollouts, kept_tokens=None))
    assert updated(trainer, rollouts)[1]["sampling/gap"] < 1e-4
    whole = sample(trainer, [0], **options | {"top_p": 1.0})
    assert whole.kept_tokens is None


def test_scores_are_centred_by_the_samplers_probabilities_in_every_iteration(fresh) -> None:
    options = ["--temperature=1", "--top_p=0.99", "--loss_type=dppo", "--max_sampling_gap=1000"]
    rollouts = sample(fresh(*options), [0], temperature=1.0, top_p=0.99)

    def norm(rollouts, *flags) -> float:
        return updated(fresh(*options, *flags), rollouts)[1]["grad_norm"]

    assert (plain := norm(rollouts)) > 0
    assert norm(rollouts, "--score_centering") == pytest.approx(plain, rel=1e-4)  # on policy nothing is subtracted
    sharper = [torch.zeros(len(row)) for row in rollouts.logprobs]  # another sampler, of half the temperature
    kept = [one._replace(logprobs=2 * one.logprobs) for one in rollouts.kept_tokens]
    for one, own, ids in zip(kept, sharper, rollouts.rows.completions, strict=True):
        token = one.tokens()
        one.logprobs.sub_(torch.zeros(len(own)).index_add_(0, token, one.logprobs.exp()).log()[token])
        own[token[one.ids == ids[token]]] = one.logprobs[one.ids == ids[token]]
    other = replace(rollouts, logprobs=sharper, kept_tokens=kept)
    assert norm(other, "--score_centering") != pytest.approx(plain, rel=1e-3)
    assert norm(other, "--score_centering", "--num_iterations=2", "--learning_rate=1e-3") > 0
    wrong = [one._replace(logprobs=one.logprobs - 1) for one in kept]
    with pytest.raises(ValueError, match=r"row \d+, token \d+: score_centering needs probabilities that sum to 1"):
        norm(replace(other, kept_tokens=wrong), "--score_centering")


def test_log_probs_that_are_not_those_sampled_with_stop_the_run_before_a_step(fresh, monkeypatch) -> None:
    # Logits at half their size: about what a scale that the model's configuration names otherwise does.
    trainer = fresh("--dtype=bfloat16", "--use_peft")
    check = packed_loss.check_trainable
    monkeypatch.setattr(packed_loss, "check_trainable", lambda model, **_: replace(check(model), logit_scale=0.5))
    before = [p.detach().clone() for p in trainer.policy.parameters()]
    with pytest.raises(FloatingPointError, match=r"^samples \[\d.*\]: their log-probs in the update are not those"):
        update_on_a_group(trainer)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.policy.parameters(), strict=True))
    assert update_on_a_group(fresh("--dtype=bfloat16", "--use_peft", "--max_sampling_gap=1000"))["sampling/gap"] > 0.3


def test_the_correction_multiplies_the_policy_term_by_the_truncated_ratio(fresh) -> None:
    """Over two iterations: the ratio is that of the first, while the policy is the one that sampled."""
    argv = ("--max_sampling_gap=1000", "--num_iterations=2", "--max_grad_norm=1e9", "--credit=none")
    plain, correcting = fresh(*argv), fresh(*argv, "--importance_sampling_clip_max=1.5")
    rollouts = sample(plain, [0], temperature=plain.config.temperature, max_completion_length=24)
    shift = torch.tensor([0.0, 0.2, -0.2, 1.0]).repeat(6)  # nats
    shifted = replace(rollouts, logprobs=[row - shift[: len(row)] for row in rollouts.logprobs])

    def change(trainer, rollouts, weights) -> tuple[torch.Tensor, dict[str, float]]:
        trainer.optimizer = torch.optim.SGD(trainer.policy.parameters(), 1e-3)
        before = torch.cat([p.detach().flatten() for p in trainer.policy.parameters()])
        _, metrics = updated(trainer, rollouts, edits=weights)
        return torch.cat([p.detach().flatten() for p in trainer.policy.parameters()]) - before, metrics

    drawn = torch.Generator().manual_seed(0)
    weights = [0.5 + torch.rand(length, generator=drawn) for length in rollouts.rows.lengths]
    corrected = [row * shift[: len(row)].exp().clamp(max=1.5) for row in weights]
    expected, _ = change(plain, rollouts, corrected)
    actual, metrics = change(correcting, shifted, weights)
    assert expected.any()
    assert (actual - expected).norm() <= 1e-3 * expected.norm()
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(1.5)
    assert metrics["sampling/importance_sampling_ratio/min"] == pytest.approx(math.exp(-0.2), rel=1e-3)
