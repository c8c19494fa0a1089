"""`python -m benchmarks evidence turns-direction`: does credit for turns point a step better at the true gradient?

Environment and players are those of `turns`, cosines those of `alignment`. Log-probs are over what was drawn from: two
boxes or ten digits.
"""

import functools
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.harness.results import Pieces, interval, made_by, table
from benchmarks.research import alignment, turns
from benchmarks.research.arms import PLAIN, Arm, Judged
from benchmarks.research.models import Problem
from cfa_kernels import CounterfactualConfig, KeptTokens, Rows, counterfactual_credit, packed_logprobs
from cfa_kernels.credit.weights import Control
from cfa_kernels.options import Count, check_fields
from cfa_kernels.scoring.packed import PackedForward
from trainer.data import encode_prompt

ANSWER = 2 * turns.DECISIVE
"""Tokens of an answer, names and digits."""


@dataclass(frozen=True)
class DirectionSettings:
    """Size of the measurement, at each density."""

    players: str = "runs/turns"
    """Folder of `turns`, whose policy and reference are taken, or made by its recipe."""
    truth_groups: Count = 1024
    """Groups of the true gradient."""
    blocks: Count = 8
    """Blocks of 16 groups that arms are measured on."""
    replays: Count = 4
    """Replays from behind each decisive turn."""
    seed: int = 0
    """Seed of boxes and draws."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Game(Problem):
    """Boxes as a problem."""

    boxes: turns.Boxes

    @property
    def decisive(self) -> Tensor:
        """Whether a turn offers what is asked for, (turns,)."""
        return torch.tensor([bool({*offer} & {*self.boxes.wanted}) for offer in self.boxes.offers])


class Opener(alignment.Policy):
    """The policy of `turns`, which opens boxes of so many turns, and its reference."""

    def __init__(
        self, players: Sequence[turns.Player], count: int, settings: alignment.AlignmentSettings, games: int = 2048
    ) -> None:
        (self.player, self.reference), self.turns = players, count
        self.model, self.tokenizer, self.parameters = (
            self.player.model, self.player.tokenizer, [*self.player.model.parameters()],
        )  # fmt: skip
        self.group, self.continuations, self.rows_at_once = settings.group, settings.continuations, turns.AT_ONCE
        self.temperature, self.token_budget, rng = 1.0, None, random.Random(f"direction {count} {settings.seed}")
        drawn = [turns.Boxes.draw(rng, count) for _ in range(games)]
        self.problems = [Game(encode_prompt(one.question, self.tokenizer), one.gold, boxes=one) for one in drawn]

    def answered(
        self, problems: Sequence[Problem], begun: Sequence[Tensor] | None = None, *, greedy: bool = False
    ) -> tuple[list[Tensor], list[float]]:
        """Play on from the turns that have begun; completions and their rewards."""
        opened, alike = [[]] * len(problems) if begun is None else [*map(self.opened, begun)], defaultdict(list)
        for i, names in enumerate(opened):
            alike[len(names)].append(i)
        found = dict[int, tuple[Tensor, float]]()
        for some in alike.values():
            games = [cast("Game", problems[i]).boxes for i in some]
            played = self.player.play(
                games, [opened[i] for i in some], torch.rand(len(some), self.turns + turns.DECISIVE)
            )
            for i, game, (names, answer) in zip(some, games, played, strict=True):
                whole = self.player.begun(game, names) + self.player.ids(game.answer(answer))
                found[i] = torch.tensor(whole[len(problems[i].prompt) :]), float(answer == game.gold)
        return [found[i][0] for i in range(len(found))], [found[i][1] for i in range(len(found))]

    def choices(self, row: Tensor) -> Tensor:
        """Tokens of a completion that open a box: they follow two offers, each a name and a question mark."""
        asks = row == self.player.ids("?")[0]
        return (asks[1:-3] & asks[3:-1]).nonzero().flatten() + 4

    def opened(self, row: Tensor) -> list[str]:
        """Names of the boxes that a completion opens."""
        return [self.tokenizer.decode([token]).strip() for token in row[self.choices(row)].tolist()]

    def logprobs(self, forward: PackedForward) -> list[Tensor]:
        """Compute the log-prob of each token among those that it was drawn from; 0 for what was not drawn."""
        kept = list[KeptTokens]()
        for row in forward.rows.completions:
            drawn = [[token] for token in row.tolist()]
            for t in self.choices(row).tolist():
                drawn[t] = row[[t - 4, t - 2]].tolist()
            drawn[-ANSWER + 1 :: 2] = [self.player.ids("0123456789")] * turns.DECISIVE
            kept.append(KeptTokens.of(drawn))
        return cast("list[Tensor]", forward.logprobs(self.temperature, kept_tokens=kept))


def credited(judged: Judged, name: str, control: Control | None = None) -> list[Tensor]:
    """Advantages by an arm of `turns`, or "external", of the turns that open a box; the answer keeps its own."""
    policy, plain, problems = cast("Opener", judged.policy), judged.plain, cast("list[Game]", judged.groups.problems)
    rows = Rows(judged.groups.rows.prompts, [row[:-ANSWER] for row in judged.groups.rows.completions])
    masks = [
        torch.zeros(n).index_fill(0, policy.choices(row), 1)
        for n, row in zip(rows.lengths, rows.completions, strict=True)
    ]
    columns: dict[str, Any] = {}
    if name == "external":
        columns["external"] = [one.decisive.float() for one in problems]
    elif name == "progress":
        with torch.no_grad():
            for column, player in (("old_logprobs", policy.player), ("ref_logprobs", policy.reference)):
                columns[column] = [row.detach() for row in packed_logprobs(player.model, rows)]  # type: ignore[union-attr]
    else:
        columns["targets"] = [one.boxes.outcome(one.answer) for one in problems]
    options = {"estimator": name, "units": "turns"} if name == "external" else turns.ARMS[name]
    credit = counterfactual_credit(
        policy.model, policy.tokenizer, rows, mask=masks, advantages=plain, seed=rows.lengths, **columns,
        config=CounterfactualConfig(**options, weights="redistribute", control=control),
    )  # fmt: skip
    tokens = (row.expand(n) for row, n in zip(credit.applied_to(plain), rows.lengths, strict=True))
    return [torch.cat([own, a.expand(ANSWER)]) for own, a in zip(tokens, plain, strict=True)]


def replayed(judged: Judged) -> list[Tensor]:
    """By how much each decisive turn, and then the answer, moves the share of replays that are right; other turns 0."""
    policy, groups = cast("Opener", judged.policy), judged.groups
    completions, problems = groups.rows.completions, cast("list[Game]", groups.problems)
    places = [policy.choices(row)[one.decisive] for row, one in zip(completions, problems, strict=True)]
    begun = [row[: place + 1] for row, own in zip(completions, places, strict=True) for place in own]
    asked = [one for one in problems for _ in range(turns.DECISIVE)]
    values = policy.values(asked, begun, policy.continuations).view(-1, turns.DECISIVE)
    moved = torch.cat([groups.means[:, None], values, groups.rewards[:, None]], 1).diff(dim=1)
    rows = [torch.zeros(n) for n in groups.rows.lengths]
    for row, own, parts in zip(rows, places, moved, strict=True):
        row[own], row[-ANSWER:] = parts[:-1], parts[-1]
    return rows


ARMS = {
    PLAIN: Arm(),
    **{name: Arm(advantages=functools.partial(credited, name=name)) for name in turns.ARMS},
    "masked turn, permuted": Arm(advantages=functools.partial(credited, name="masked turn", control="permuted")),
    "decisive turns": Arm(advantages=functools.partial(credited, name="external")),
    "replayed truth": Arm(advantages=replayed),
}
"""Kinds of credit, all but plain and the last by `redistribute`."""


def run(pieces: Pieces, folder: Path, settings: DirectionSettings) -> dict[str, Any]:
    """Measure the arms at every density: the document that `markdown` writes."""
    document: dict[str, Any] = {"settings": asdict(settings), "densities": {}}
    players = turns.players(Path(settings.players), turns.TurnsSettings(seed=settings.seed))
    sizes = alignment.AlignmentSettings(
        truth_groups=settings.truth_groups, blocks=settings.blocks, batch=alignment.MAIN, block=16, moments=0,
        continuations=settings.replays, seed=settings.seed,
    )  # fmt: skip
    for density, count in turns.DENSITIES.items():
        own, policy = f"{count} turns", Opener(players, count, sizes)
        document["densities"][density] = {"turns": count} | alignment.run(
            pieces.below(own), folder / own, sizes, arms=ARMS, policy=policy
        )
    return document


def markdown(document: Mapping[str, Any]) -> str:
    """The tables of a document."""
    lines = [f"# Direction of a step by credit for turns\n\n{made_by(document)}.\n"]
    for density, found in document["densities"].items():
        look, sizes, body = found["look"], found["settings"], list[list[str]]()
        plain = found["arms"][PLAIN][str(alignment.MAIN)]
        known = plain["cosine"] > 1.96 * plain["error"]
        for name, figures in found["arms"].items():
            at, aim = figures[str(alignment.MAIN)], figures["aim"]
            body.append([
                name, f"{at['cosine']:.3f} ± {at['error']:.3f}", interval(_within(at, "difference"), 3),
                interval(_within(at, "ratio")) if known else "–",
                f"{aim['value']:.2f} ± {aim['error']:.2f}" if aim else "–", f"{figures['cost']:.2f}",
            ])  # fmt: skip
        lines.append(
            f"\n## {density} of {found['turns']} turns can matter\n\nCosine of the gradient of "
            f"{alignment.MAIN * sizes['group']} rollouts with the true one (from {sizes['truth_groups']} groups of "
            f"{sizes['group']}; cosine of its halves {found['agreement']:.2f}), its difference from plain's and, where "
            f"plain's is above 0, the ratio, with 95 % intervals over {plain['batches']} batches. "
            f"{look['right']:.0%} of a first look's rollouts are right, and {look['mixed']:.0%} of its groups mixed. "
            "*Aim*: cosine of the arm's mean gradient, 1 is no bias. *Cost*: the processor's seconds for the credit "
            "over those of a plain step.\n"
        )
        lines.append(table(["arm", "cosine", "difference", "to plain", "aim", "cost"], body))
    return "\n".join(lines) + "\n"


def _within(figure: Mapping[str, Any], name: str) -> dict[str, float]:
    """A figure with its 95 % interval."""
    value, reach = figure[name], 1.96 * figure[f"{name}_error"]
    return {"value": value, "low": value - reach, "high": value + reach}
