"""IBPO's step in the trainer: who is corrected, what it earns, and where credit then falls."""

import dataclasses
import math

import pytest
import torch

from cfa_kernels.estimators.siblings import edited_tokens
from cfa_kernels.rows import Rows
from examples import ibpo
from examples.ibpo import correction_prompt
from tests.support.edit_table import edits_by_table, table
from tests.support.embedded import EVEN, settings, updated
from trainer.data import Row
from trainer.rewards.calls import group_advantages
from trainer.rollouts.engine import Rollouts
from trainer.rollouts.in_process import TransformersEngine
from trainer.state import Samples, Shaped
from trainer.step import training_step

pytestmark = pytest.mark.slow

SHORT = ("--max_completion_length=24", "--no_mask_truncated_completions", "--temperature=1.5")
ON = ("--shaping_func=examples.ibpo:compare_and_correct", "--credit=none", EVEN, *SHORT)


@pytest.fixture
def written(monkeypatch):
    """Every batch of corrections that is generated, with its prompts and options."""
    batches = []
    sample = TransformersEngine.__call__

    def recorded(engine, prompts, **options):
        rollouts = sample(engine, prompts, **options)
        if options.get("names"):  # of corrections
            batches.append((prompts, options, rollouts))
        return rollouts

    monkeypatch.setattr(TransformersEngine, "__call__", recorded)
    return batches


def parameters(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.policy.parameters()])


def by_hand(trainer, rewards, corrected, *flags, truncated=()) -> Shaped:
    """Corrections of one group of "a 0", "a 1", ... by given texts; "right" in a text is what earns a reward."""
    tokenizer = trainer.tokenizer
    texts = [f"a {i}" for i in range(len(rewards))]

    def batch(texts: list[str]) -> Rollouts:
        ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
        cut = torch.tensor([i in truncated for i in range(len(texts))])
        return Rollouts(Rows([row[:1] for row in ids], ids), cut, texts, [torch.zeros(len(row)) for row in ids])

    def judge(prompts, completions, completion_ids, question):
        wrong = [f"q {b}" for b in range(len(rewards)) if rewards[b] < ibpo.CORRECT]
        assert question == prompts == wrong[: len(completions)]
        assert completion_ids == [tokenizer(text)["input_ids"] for text in completions]
        return [{"?": None, "x": "x"}.get(text, float("right" in text)) for text in completions]

    keys, data = [(0, 0, 0, g) for g in range(len(texts))], [Row({"question": f"q {b}"}) for b in range(len(texts))]
    sampled = Samples(keys, data, batch(texts), torch.tensor(rewards))
    config, engine = (
        settings("--shaping_func=examples.ibpo:compare_and_correct", "--num_generations=4", *flags),
        lambda *_, **__: batch(corrected),
    )
    changed = dataclasses.replace(trainer, config=config, engine=engine, rewards={"judge": judge})
    return ibpo.compare_and_correct(changed, sampled, Shaped(sampled.rewards))


def notes_of(notes) -> dict[int, tuple[str, bool]]:
    return {b: tuple(note["correction"].values()) for b, note in notes.items()}


def test_a_right_correction_raises_its_attempt_before_the_group_is_compared_and_keeps_credit_where_it_edits(
    trainer,
) -> None:
    shaped = by_hand(trainer, [1.0, 0.0, 0.0, 1.0], ["a 1 right", "a 3"])
    assert shaped.rewards.tolist() == pytest.approx([1, 0.3, 0, 1])
    assert notes_of(shaped.notes) == {1: ("a 1 right", True), 2: ("a 3", False)}
    advantages = group_advantages(shaped.rewards, 4)
    mean, std = 2.3 / 4, math.sqrt((0.425**2 + 0.275**2 + 0.575**2 + 0.425**2) / 3)
    expected = [(r - mean) / (std + 1e-4) for r in (1, 0.3, 0, 1)]
    assert advantages.tolist() == pytest.approx(expected, rel=1e-5)

    tokens = lambda text: trainer.tokenizer(text)["input_ids"]  # noqa: E731
    edits = [row.tolist() for row in shaped.edits]
    (gate,) = map(list, edits_by_table(tokens("a 1"), tokens("a 1 right")))
    assert 0 in gate
    assert edits == [gate if b == 1 else [1.0] * len(row) for b, row in enumerate(edits)]
    assert shaped.metrics["corrections/edited_fraction"] == pytest.approx(sum(gate) / len(gate))
    assert shaped.metrics["corrections/fraction"] == 2 / 4
    assert shaped.metrics["corrections/right_fraction"] == 1 / 2


@pytest.mark.parametrize(
    ("rewards", "flag", "corrected"),
    [
        ([1.0, 0, 0, 1], "--mask_truncated_completions", [1]),
        ([1.0, 0, 0, 1], "--no_mask_truncated_completions", [1, 2]),
        ([0.0] * 4, "--no_mask_truncated_completions", []),
        ([1.0] * 4, "--no_mask_truncated_completions", []),
    ],
)
def test_wrong_completions_beside_correct_ones_are_corrected_truncated_ones_only_if_the_loss_counts_them(
    trainer, rewards, flag, corrected
) -> None:
    shaped = by_hand(trainer, rewards, ["right"] * len(corrected), flag, truncated=[2])
    assert list(shaped.notes) == corrected
    if not corrected:
        assert shaped.rewards.tolist() == rewards
        assert all((row == 1).all() for row in shaped.edits)
        assert shaped.metrics == {"corrections/fraction": 0, "corrections/too_long": 0, "corrections/tokens": 0}


def test_the_prompt_shows_attempt_and_nearest_correct_sibling_and_one_that_is_too_long_is_counted(
    fresh, written, monkeypatch
) -> None:
    trainer, limited = fresh(*ON), fresh(*ON)
    free = training_step(trainer, 1, [0, 1, 2])
    (prompts, options, _), *rest = written
    assert not rest
    texts, rows = free.batch.rollouts.texts, free.batch.rollouts.ids()
    assert len(prompts) == len(free.notes) > 2
    for b, prompt, key in zip(free.notes, prompts, options["keys"], strict=True):
        group = range(b // 8 * 8, b // 8 * 8 + 8)
        nearest = min((o for o in group if free.batch.rewards[o]), key=lambda o: table(rows[b], rows[o])[-1][-1])
        reference, question = texts[nearest], trainer.rows[free.batch.keys[b][-2]]["question"]
        assert prompt == correction_prompt(trainer, question, texts[b], reference)
        text = trainer.tokenizer.decode(prompt)
        places = [text.index(part) for part in (question, f"wrong:\n{texts[b]}", f"correct:\n{reference}")]
        assert places == sorted(places)
        assert key == (0, 1, free.batch.keys[b][2], b % 8, 1)

    lengths = {b: len(prompt) for b, prompt in zip(free.notes, prompts, strict=True)}
    limit = sorted(lengths.values())[len(lengths) // 2]
    monkeypatch.setattr(ibpo, "_longest_prompt", lambda _: limit)
    result = training_step(limited, 1, [0, 1, 2])
    fit = [b for b, length in lengths.items() if length <= limit]
    assert notes_of(result.notes) == {b: notes_of(free.notes)[b] for b in fit}
    assert result.metrics["corrections/too_long"] == len(lengths) - len(fit) > 0
    assert result.metrics["corrections/fraction"] == len(fit) / 24
    assert all((result.credit.weights[b] == 1).all() for b in range(24) if b not in fit)


@pytest.mark.parametrize(
    "options", [("--num_iterations=2",), ("--estimator=masking", "--control=random", "--normalize=mean")]
)
def test_weights_are_those_of_credit_and_zero_where_the_correction_left_tokens_as_they_were(
    fresh, written, options
) -> None:
    trainer, twin = fresh(*ON, *options), fresh(*ON, *options)
    result = training_step(trainer, 1, [0, 1, 2])
    fixed = dict(zip(result.notes, written[0][2].ids(), strict=True))
    right = [b for b, (_, is_right) in notes_of(result.notes).items() if is_right]
    assert 0 < len(right) < len(fixed)
    gate = [torch.ones(length) for length in result.batch.rollouts.rows.lengths]
    for b in right:
        own = result.batch.rollouts.ids()[b]
        gate[b] = edited_tokens(torch.tensor(own), torch.tensor(fixed[b]))
        assert tuple(gate[b].tolist()) in edits_by_table(own, fixed[b])
    shaped = result.batch.rewards + 0.3 * torch.tensor([float(b in right) for b in range(24)])
    advantages = group_advantages(shaped, 8)
    assert torch.equal(result.advantages, advantages)

    credit, _ = updated(twin, result.batch.rollouts, advantages)
    expected = [row * kept for row, kept in zip(credit.weights, gate, strict=True)]
    if "--normalize=mean" in options:
        for b in right:
            expected[b] /= expected[b].mean() or 1
    weights = result.credit.weights
    assert all(torch.equal(row, other) for row, other in zip(weights, expected, strict=True))
    assert any((weights[b] == 0).any() for b in right)
    third = fresh(*ON, *(option for option in options if "iterations" in option), "--credit=none")
    updated(third, result.batch.rollouts, advantages, edits=expected)
    assert torch.equal(parameters(trainer), parameters(third))
    assert not torch.equal(parameters(trainer), parameters(twin))
