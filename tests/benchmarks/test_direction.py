"""Direction of credit for turns: log-probs of what was drawn, advantages that stay with their turns, a run's tables."""

import dataclasses

import pytest
import torch

from benchmarks.harness.results import Pieces
from benchmarks.research import alignment, direction, turns
from benchmarks.research.alignment import AlignmentSettings
from benchmarks.research.arms import PLAIN, Judged
from benchmarks.research.direction import ANSWER, ARMS, DirectionSettings, Opener
from cfa_kernels import packed_forward
from trainer.settings import ASSETS

COUNT = 4


class Lucky(turns.Player):
    """A player that knows the answer every other time."""

    def play(self, games, opened, draws):
        played = super().play(games, opened, draws)
        return [
            (names, game.gold if i % 2 else answer)
            for i, (game, (names, answer)) in enumerate(zip(games, played, strict=True))
        ]


@pytest.fixture(scope="module")
def policy():
    settings = AlignmentSettings(group=4, continuations=2)
    return Opener([Lucky(ASSETS), turns.Player(ASSETS)], COUNT, settings, games=3)


@pytest.fixture(scope="module")
def judged(policy):
    return Judged(policy, next(policy.groups(0, 9, count=2, batch=2)))


def test_logprobs_are_those_that_the_player_draws_by(policy, judged):
    rows, problem = judged.groups.rows, judged.groups.problems[0]
    prompt, row = rows.prompts[0], rows.completions[0]
    with torch.no_grad():
        found = policy.logprobs(packed_forward(policy.model, rows))[0]
        logits = policy.model(input_ids=torch.cat([prompt, row])[None]).logits[0, len(prompt) - 1 : -1]
    expected = torch.zeros(len(row))
    for t, offer in zip(policy.choices(row).tolist(), problem.boxes.offers, strict=True):
        ids = [policy.player.ids(f" {name}")[0] for name in offer]
        expected[t] = logits[t, ids].log_softmax(0)[ids.index(int(row[t]))]
    for t in (-3, -1):
        expected[t] = logits[t, policy.player.ids("0123456789")].log_softmax(0)[int(policy.tokenizer.decode(row[t]))]
    assert (found - expected).abs().max() < 1e-5
    assert all(name in offer for name, offer in zip(policy.opened(row), problem.boxes.offers, strict=True))


def test_credit_moves_advantages_among_turns_and_leaves_the_answer_its_own(policy, judged):
    plain, rows = judged.plain, judged.groups.rows.completions
    for name in [*turns.ARMS, "masked turn, permuted", "decisive turns"]:
        for row, ids, a in zip(judged.token_advantages(ARMS[name]), rows, plain, strict=True):
            own = row[policy.choices(ids)]
            assert own.sum().item() == pytest.approx(COUNT * a.item(), abs=1e-4), name
            assert ((own / a > -1e-6) & (own / a < 2 + 1e-6)).all(), name
            assert (row[-ANSWER:] == a).all()


def test_decisive_turns_get_twice_the_advantage_and_others_none(policy, judged):
    rows, groups = judged.token_advantages(ARMS["decisive turns"]), judged.groups
    for row, ids, problem, a in zip(rows, groups.rows.completions, groups.problems, judged.plain, strict=True):
        assert torch.allclose(row[policy.choices(ids)], 2 * a * problem.decisive.float(), atol=1e-5)


def test_replays_move_decisive_turns_only_and_add_up_to_what_a_rollout_gained(policy, judged):
    groups = judged.groups
    rows = judged.token_advantages(ARMS["replayed truth"])
    for row, ids, problem, gain in zip(
        rows, groups.rows.completions, groups.problems, groups.rewards - groups.means, strict=True
    ):
        own = row[policy.choices(ids)]
        assert (own[~problem.decisive] == 0).all()
        assert (own.sum() + row[-1]).item() == pytest.approx(gain.item(), abs=1e-5)


@pytest.mark.slow
def test_a_run_compares_every_arm_at_every_density(tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "players", lambda *arguments: (Lucky(ASSETS), turns.Player(ASSETS)))
    monkeypatch.setattr(turns, "DENSITIES", {"1/2": COUNT})
    monkeypatch.setattr(alignment, "SIZES", (1, 2))
    settings = DirectionSettings(truth_groups=8, blocks=2, replays=1)
    head = {"command": "c", "environment": {"commit": "d", "dirty": False}}
    pieces = Pieces(tmp_path / "pieces", dataclasses.asdict(settings), head)
    document = head | direction.run(pieces, tmp_path, settings)
    figures = document["densities"]["1/2"]["arms"]
    assert figures.keys() == ARMS.keys()
    assert figures[PLAIN]["4"]["ratio"] == 1
    assert all(f"| {name} |" in direction.markdown(document) for name in ARMS)
