"""Measure which estimators find the turns that mattered, in an environment whose snapshots are replayed."""

import functools
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.results import Pieces, interval, made_by, table
from benchmarks.research.agreement import AUROC, agreement
from benchmarks.research.models import Subject
from benchmarks.research.regimes import make
from cfa_kernels import CounterfactualConfig, Rows, counterfactual_credit, packed_logprobs
from cfa_kernels.options import Count, Share, check_fields
from trainer.data import Row, encode_prompt
from trainer.settings import ASSETS

NAMES = [  # a token each
    "apples", "beads", "books", "cards", "coins", "hours",
    "marbles", "miles", "pencils", "shells", "stamps", "stickers",
]  # fmt: skip
DECISIVE = 2  # turns of a rollout that offer what is asked for
LONGEST = 16  # turns of the rollouts that are learnt from
MOST = len(NAMES) - 2  # boxes that those ask for: every digit that was seen is one more that can be learnt
RECIPE = {"model": str(ASSETS), "learning_rate": 1e-3, "warmup_steps": 50}
"""Of the reference: the embedded model, which can copy digits, learns on."""
_BY_GOLD = {"units": "turns", "target": "gold", "answer_format": "say(.+)"}
ARMS: dict[str, dict[str, Any]] = {
    "masked turn": _BY_GOLD,
    "masked turn with its observation": _BY_GOLD | {"mask_observation": True},
    "prefix gain": _BY_GOLD | {"estimator": "prefix_gain"},
    "progress": {"estimator": "progress"},
}
CHANCE = "random"
AT_ONCE = 512  # replays


@dataclass(frozen=True)
class TurnsSettings:
    """Size of the measurement."""

    steps: Count = 1500
    """Steps that the reference learns, from pupils who open boxes at random."""
    more_steps: Count = 60
    """Steps that the policy learns on, half from rollouts of the reference that succeeded."""
    rollouts: Count = 64
    """Rollouts of the policy that every arm judges, at each density."""
    replays: Count = 48
    """Replays from each snapshot of those."""
    effect: Share = 0.1
    """Least change of the share of replays that succeed, of a turn that mattered."""
    seed: int = 0
    """Seed of boxes and draws."""

    def __post_init__(self) -> None:
        check_fields(self)


DENSITIES = {"1/2": 4, "1/8": 16}
"""Turns of a rollout by the share of them that can matter."""


@dataclass(frozen=True)
class Boxes:
    """Deterministic environment: every turn offers two boxes, one of which the policy opens, and shows its digit.

    The digits of two boxes are asked for. A turn that offers one of them is decisive: it is offered once. A snapshot is
    the list of the boxes that were opened.
    """

    wanted: tuple[str, ...]
    offers: tuple[tuple[str, str], ...]
    digits: Mapping[str, int]

    @classmethod
    def draw(cls, rng: random.Random, turns: int, decisive: int = DECISIVE) -> "Boxes":
        """Draw the digits, what is asked for, and what is offered."""
        names = rng.sample(NAMES, len(NAMES))
        wanted, others = (*names[:decisive],), names[decisive:]
        asked = dict(zip(rng.sample(range(turns), decisive), rng.sample(wanted, decisive), strict=True))
        offers = []
        for turn in range(turns):
            pair = [asked[turn], rng.choice(others)] if turn in asked else rng.sample(others, 2)
            offers.append((*rng.sample(pair, 2),))
        return cls(wanted, tuple(offers), {name: rng.randrange(10) for name in NAMES})

    @property
    def question(self) -> str:
        """What the policy is asked."""
        return f"How many {' and '.join(self.wanted)}?"

    @property
    def gold(self) -> str:
        """The right answer."""
        return "".join(str(self.digits[name]) for name in self.wanted)

    def observation(self, opened: Sequence[str]) -> str:
        """What the environment writes after some boxes were opened."""
        shown, rest = f"{self.digits[opened[-1]]}," if opened else "", self.offers[len(opened) :]
        return shown + ("".join(f" {name}?" for name in rest[0]) if rest else " end.")

    def pieces(self, opened: Sequence[str]) -> list[tuple[str, int]]:
        """Text of a rollout up to a snapshot, and whether the policy wrote it."""
        parts = [(self.observation([]), 0)]
        for turn in range(1, len(opened) + 1):
            parts += [(f" {opened[turn - 1]}", 1), (self.observation(opened[:turn]), 0)]
        return parts

    def outcome(self, digits: str) -> str:
        """What is asked for, with digits: the name before its digit stands as in the turn that opened the box."""
        return "".join(f" {name}{digit}" for name, digit in zip(self.wanted, digits, strict=True))

    def answer(self, digits: str) -> str:
        """The policy's last turn."""
        return f" say{self.outcome(digits)}"


def pupils(split: str, seed: int) -> Iterator[Row]:
    """Rollouts of pupils who open boxes at random, and guess what they have not seen."""
    rng = random.Random(f"{split} {seed}")
    while True:
        turns = rng.randint(DECISIVE, LONGEST)
        boxes = Boxes.draw(rng, turns, rng.randint(DECISIVE, min(turns, MOST)))
        yield told(boxes, [rng.choice(offer) for offer in boxes.offers], rng)


def told(boxes: Boxes, opened: Sequence[str], rng: random.Random) -> Row:
    """A rollout as a row to learn from; rows end in a marked number, which nothing here reads."""
    digits = "".join(str(boxes.digits[name] if name in opened else rng.randrange(10)) for name in boxes.wanted)
    text = "".join(part for part, _ in boxes.pieces(opened)) + boxes.answer(digits)
    return Row({"question": boxes.question, "answer": f"{text} #### {digits}"})


Played = tuple[list[str], str]
"""What a rollout opened, and its answer."""


class Player:
    """A model that opens boxes; among those offered it draws by its own probabilities."""

    def __init__(self, folder: Path) -> None:
        self.subject = Subject(str(folder))
        self.model, self.tokenizer = self.subject.model, self.subject.tokenizer
        self._known = dict[str, list[int]]()
        self._digits = [self._one(str(digit)) for digit in range(10)]

    def ids(self, text: str) -> list[int]:
        """Tokens of a piece of text; the few pieces that there are come again and again."""
        if text not in self._known:
            self._known[text] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._known[text]

    def _one(self, text: str) -> int:
        (token,) = self.ids(text)
        return token

    def begun(self, boxes: Boxes, opened: Sequence[str]) -> list[int]:
        """Tokens of prompt and rollout up to a snapshot."""
        parts = [token for text, _ in boxes.pieces(opened) for token in self.ids(text)]
        return [*encode_prompt(boxes.question, self.tokenizer), *parts]

    @torch.no_grad()
    def play(self, games: Sequence[Boxes], opened: Sequence[Sequence[str]], draws: Tensor) -> list[Played]:
        """Go on from snapshots of equally many turns; what was opened in all, and the answers.

        `draws` (G, turns + 2) in [0, 1) decide: one for each turn of the rollout, two for the answer's digits.
        """
        states, turns = [list(row) for row in opened], len(games[0].offers)
        new, cache = torch.tensor([self.begun(*pair) for pair in zip(games, states, strict=True)]), None
        for turn in range(len(states[0]), turns):
            out = self.model(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, rows = out.past_key_values, []
            choices = torch.tensor([[self._one(f" {name}") for name in game.offers[turn]] for game in games])
            odds = out.logits[:, -1].gather(1, choices).softmax(1)[:, 0]
            for g, game in enumerate(games):
                states[g].append(game.offers[turn][int(draws[g, turn] >= odds[g])])
                rows.append(self.ids(f" {states[g][-1]}") + self.ids(game.observation(states[g])))
            new = torch.tensor(rows)
        new = torch.cat([new, torch.tensor(self.ids(" say")).expand(len(games), -1)], 1)
        answers = [""] * len(games)
        for place in range(DECISIVE):
            names = torch.tensor([[self._one(f" {game.wanted[place]}")] for game in games])
            new = torch.cat([new, names], 1)
            out = self.model(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            odds = out.logits[:, -1, self._digits].softmax(1).cumsum(1)
            drawn = (draws[:, turns + place, None] >= odds).sum(1).clamp(max=9)
            answers = [answer + str(digit) for answer, digit in zip(answers, drawn.tolist(), strict=True)]
            new = torch.tensor(self._digits)[drawn][:, None]
        return list(zip(states, answers, strict=True))


def draws_of(seed: str, *shape: int) -> Tensor:
    """Numbers in [0, 1) by a seed of text."""
    generator = torch.Generator().manual_seed(random.Random(seed).randrange(2**31))
    return torch.rand(shape, generator=generator)


def players(folder: Path, settings: TurnsSettings) -> tuple[Player, Player]:
    """The policy and the reference that it learnt on from, made where they are not there."""
    rows = itertools.islice(pupils("train", settings.seed), 32 * settings.steps)
    held_out = list(itertools.islice(pupils("test", settings.seed), 2))
    first = make(folder / "reference", rows, held_out, RECIPE | {"max_steps": settings.steps})
    reference, rng = Player(first), random.Random(settings.seed)
    learnt, half = list[Row](), 16 * settings.more_steps
    while not (folder / "policy" / "model" / "warmup.json").exists() and len(learnt) < half:
        turns = rng.randint(DECISIVE, LONGEST)
        games = [Boxes.draw(rng, turns) for _ in range(256)]
        played = reference.play(games, [[]] * 256, draws_of(f"learn {settings.seed} {len(learnt)}", 256, turns + 2))
        right = zip(games, played, strict=True)
        learnt += [told(game, opened, rng) for game, (opened, answer) in right if answer == game.gold]
    rows = itertools.chain(learnt[:half], itertools.islice(pupils("more", settings.seed), half))
    recipe = {"model": str(first), "max_steps": settings.more_steps, "learning_rate": 5e-4, "warmup_steps": 10}
    return Player(make(folder / "policy", rows, held_out, recipe)), reference


def replayed(policy: Player, games: Sequence[Boxes], opened: Sequence[list[str]], settings: TurnsSettings) -> Tensor:
    """Share of replays from each snapshot of rollouts that succeed, (G, turns + 1), by equal draws at all snapshots."""
    turns, count, values = len(games[0].offers), settings.replays, []
    draws = draws_of(f"replay {settings.seed}", len(games), count, turns + 2).flatten(0, 1)
    again = [game for game in games for _ in range(count)]
    for turn in range(turns + 1):
        begun = [row[:turn] for row in opened for _ in range(count)]
        played = list[Played]()
        for start in range(0, len(again), AT_ONCE):
            some = slice(start, start + AT_ONCE)
            played += policy.play(again[some], begun[some], draws[some])
        right = [answer == game.gold for game, (_, answer) in zip(again, played, strict=True)]
        values.append(torch.tensor(right, dtype=torch.float32).view(len(games), count).mean(1))
    return torch.stack(values, 1)


def judged(policy: Player, reference: Player, turns: int, settings: TurnsSettings) -> dict[str, Any]:
    """Let every arm judge rollouts of so many turns, and replay them."""
    rng, count = random.Random(f"judge {settings.seed}"), settings.rollouts
    games = [Boxes.draw(rng, turns) for _ in range(count)]
    played = policy.play(games, [[]] * count, draws_of(f"judge {settings.seed} {turns}", count, turns + 2))
    prompts, completions, masks = list[Tensor](), list[Tensor](), list[Tensor]()
    for game, (opened, answer) in zip(games, played, strict=True):
        parts = [(policy.ids(text), own) for text, own in (*game.pieces(opened), (game.answer(answer), 1))]
        prompts.append(torch.tensor(encode_prompt(game.question, policy.tokenizer)))
        completions.append(torch.tensor([token for ids, _ in parts for token in ids]))
        masks.append(torch.tensor([own for ids, own in parts for _ in ids]))
    rows, columns = Rows(prompts, completions), dict[str, Any]()
    targets = [torch.tensor(policy.ids(game.outcome(game.gold))) for game in games]
    with torch.no_grad():
        for name, player in (("old_logprobs", policy), ("ref_logprobs", reference)):
            columns[name] = [row.detach() for row in packed_logprobs(player.model, rows)]  # type: ignore[union-attr]
    scores = {}
    for name, options in ARMS.items():
        given = columns if name == "progress" else {"targets": targets}
        config = CounterfactualConfig(**options)
        credit = counterfactual_credit(policy.model, policy.tokenizer, rows, config=config, mask=masks, **given)
        scores[name] = [drop[:turns].tolist() for drop in credit.drop]
    values = replayed(policy, games, [opened for opened, _ in played], settings)
    return {
        "right": sum(answer == game.gold for game, (_, answer) in zip(games, played, strict=True)) / count,
        "decisive": [[any(name in game.wanted for name in offer) for offer in game.offers] for game in games],
        "effects": values.diff(dim=1).tolist(),
        "scores": scores,
    }


def run(pieces: Pieces, folder: Path, settings: TurnsSettings) -> dict[str, Any]:
    """Judge rollouts at every density and sum up: the document that `markdown` writes."""
    document: dict[str, Any] = {"settings": asdict(settings), "densities": {}}
    policy, reference = players(folder, settings)
    for density, turns in DENSITIES.items():
        print(f"density {density}: {turns} turns")
        found = pieces.get(f"turns-{turns}", functools.partial(judged, policy, reference, turns, settings))
        effects, least = found["effects"], settings.effect
        truths = {
            "mattered": [[float(abs(value) >= least) for value in row] for row in effects],
            "helped": [[float(value >= least) for value in row] for row in effects],
        }
        every = [value for row in truths["mattered"] for value in row]
        possible = [flag for row in found["decisive"] for flag in row]
        figures = dict[str, Any]()
        for name, scores in {**found["scores"], CHANCE: None}.items():
            size = None if scores is None else [[abs(value) for value in row] for row in scores]
            figures[name] = {
                "mattered": agreement(size, truths["mattered"], AUROC),
                "helped": agreement(scores, truths["helped"], AUROC),
            }
        document["densities"][density] = {
            "turns": turns, "right": found["right"], "mattered": sum(every) / len(every),
            "mattered_of_routine": sum(m for m, p in zip(every, possible, strict=True) if not p)
            / possible.count(False),
            "mattered_of_decisive": sum(m for m, p in zip(every, possible, strict=True) if p) / sum(possible),
            "arms": figures,
        }  # fmt: skip
    return document


def markdown(document: Mapping[str, Any]) -> str:
    """The table of a document."""
    settings, lines = document["settings"], [f"# Turns that mattered\n\n{made_by(document)}.\n"]
    lines.append(
        f"AUROC within a rollout, 0.5 is chance, with 95 % intervals over rollouts. {settings['rollouts']} rollouts at "
        f"each density, {settings['replays']} replays from each snapshot. A turn mattered if the share of replays that "
        f"succeed changes by {settings['effect']} or more, and helped if it grows by that. Earlier and later turns "
        "weigh half each.\n"
    )
    for density, found in document["densities"].items():
        lines.append(
            f"\n## {density} of {found['turns']} turns can matter\n\n{found['right']:.0%} of the rollouts are right. "
            f"By replay {found['mattered_of_decisive']:.0%} of the decisive turns mattered, and "
            f"{found['mattered_of_routine']:.1%} of the others.\n"
        )
        body = [
            [name, *(interval(arm[truth].get("auroc")) for truth in ("mattered", "helped"))]
            for name, arm in found["arms"].items()
        ]
        lines.append(table(["arm", "mattered", "helped"], body))
    return "\n".join(lines) + "\n"


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Draw the AUROC of each arm for turns that helped, with its interval, at every density."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(7, 2.6), layout="constrained")
    for k, (density, found) in enumerate(document["densities"].items()):
        aurocs = [figures["helped"].get("auroc") for figures in found["arms"].values()]  # None where no turn helped
        drawn = {place + 0.1 - 0.2 * k: auroc for place, auroc in enumerate(aurocs) if auroc}
        middle = [auroc["value"] for auroc in drawn.values()]
        reach = [[abs(auroc[end] - auroc["value"]) for auroc in drawn.values()] for end in ("low", "high")]
        label = f"{found['turns']} turns, {density} can matter"
        panel.errorbar(middle, list(drawn), xerr=reach, fmt="o", capsize=3, label=label)
    panel.axvline(0.5, color="black", linewidth=0.8, linestyle="--")
    panel.set_yticks(range(len(found["arms"])), found["arms"])
    panel.invert_yaxis()
    panel.set(xlim=(0.3, 1.02), xlabel="AUROC for turns that helped, in a rollout; 0.5 is chance")
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
