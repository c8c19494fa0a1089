"""The environment of `evidence turns`: it is deterministic, as dense as it says, and its replays know what matters."""

import random

import pytest
import torch

from benchmarks.research.turns import (
    ARMS,
    DECISIVE,
    DENSITIES,
    NAMES,
    Boxes,
    Player,
    TurnsSettings,
    draw,
    judged,
    players,
)  # fmt: skip
from benchmarks.research.turns import replayed as replays
from trainer.settings import ASSETS


@pytest.mark.parametrize("turns", DENSITIES.values())
def test_as_many_turns_can_matter_as_the_density_says(turns):
    rng = random.Random(turns)
    for _ in range(50):
        boxes = Boxes.draw(rng, turns)
        decisive = [offer for offer in boxes.offers if any(name in boxes.wanted for name in offer)]
        assert len(boxes.offers) == turns
        assert sorted(name for offer in decisive for name in offer if name in boxes.wanted) == sorted(boxes.wanted)
        assert len(decisive) == DECISIVE
        assert all(len({*offer}) == 2 for offer in boxes.offers)


def test_a_rollout_is_told_in_pieces_of_the_policy_and_of_the_environment():
    digits = dict.fromkeys(NAMES, 0) | {"apples": 4, "coins": 9}
    boxes = Boxes(("apples", "cards"), (("apples", "shells"), ("coins", "cards")), digits)
    assert boxes.question == "How many apples and cards?"
    assert boxes.gold == "40"
    assert boxes.pieces(["apples", "coins"]) == [
        (" apples? shells?", 0), (" apples", 1), ("4, coins? cards?", 0), (" coins", 1), ("9, end.", 0),
    ]  # fmt: skip
    assert boxes.pieces(["apples", "coins"])[:3] == boxes.pieces(["apples"])
    assert boxes.answer("47") == " say apples4 cards7"


class Certain(Player):
    """A player that always opens what is asked for, and remembers it."""

    def __init__(self):
        pass

    def play(self, games, opened, draws):
        played = []
        for game, begun in zip(games, opened, strict=True):
            rest = [next((x for x in offer if x in game.wanted), offer[0]) for offer in game.offers[len(begun) :]]
            names = [*begun, *rest]
            played.append((names, "".join(str(game.digits[x]) if x in names else "?" for x in game.wanted)))
        return played


def test_replays_find_the_turn_at_which_a_rollout_was_lost():
    digits = dict.fromkeys(NAMES, 0)
    boxes = Boxes(("apples", "cards"), (("apples", "shells"), ("coins", "beads"), ("coins", "cards")), digits)
    games, opened = [boxes] * 2, [["shells", "coins", "cards"], ["apples", "beads", "cards"]]
    values = replays(Certain(), games, opened, TurnsSettings(replays=3))
    assert values.diff(dim=1).tolist() == [[-1, 0, 0], [0, 0, 0]]


def test_every_arm_gives_every_turn_a_number():
    player = Player(ASSETS)
    settings = TurnsSettings(rollouts=3, replays=2)
    found = judged(player, player, 4, settings)
    assert found["scores"].keys() == ARMS.keys()
    assert all([len(row) for row in rows] == [4, 4, 4] for rows in found["scores"].values())
    assert all(value == 0 for row in found["scores"]["progress"] for value in row)
    assert torch.tensor(found["effects"]).shape == (3, 4)
    assert all(sum(row) == DECISIVE for row in found["decisive"])


def test_a_figure_leaves_out_an_arm_that_no_turn_helped(tmp_path):
    known = {"helped": {"auroc": {"value": 0.8, "low": 0.7, "high": 0.9}}}
    density = {"turns": 4, "arms": {"masked turn": known, "progress": {"helped": {}}}}
    draw({"densities": {"1/2": density, "1/8": density}}, tmp_path / "turns.png")
    assert (tmp_path / "turns.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_policy_learns_on_from_the_reference(tmp_path, monkeypatch):
    play = lambda _, games, opened, draws: [([offer[0] for offer in game.offers], game.gold) for game in games]  # noqa: E731
    monkeypatch.setattr(Player, "play", play)  # who is right, as a reference is that has learnt for long
    policy, reference = players(tmp_path, TurnsSettings(steps=2, more_steps=1))  # whose one step has a rate of 0
    pairs = zip(policy.model.parameters(), reference.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
