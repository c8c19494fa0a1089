"""`python -m benchmarks evidence pretrained`: ask a model the problems of a file, and judge credit on what it writes.

How often it is right, what the detectors find in its completions, what each of their spans adds to the chance of a
right answer and what estimators say of it (`continuations.py`), and the tables of section 4.3 of "Beyond Uniform
Credit" (`drops.py`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch

from benchmarks.harness.environment import describe_environment
from benchmarks.harness.results import Pieces, made_by
from benchmarks.research import continuations, drops
from benchmarks.research.models import Problem, Subject, read_problems, require_mixed
from cfa_kernels import CounterfactualConfig, Rows, counterfactual_credit
from cfa_kernels.options import POSITIVE, Count, Interval, check_fields
from cfa_kernels.text.find import find_reasoning
from trainer.analyze.tables import bootstrap_interval
from trainer.rollouts.engine import end_ids
from trainer.settings import ASSETS

Rolled = Sequence[Mapping[str, Any]]
"""Completions, each with its `problem`'s number, `ids`, `ended`, and `reward`."""


@dataclass(frozen=True)
class PretrainedSettings:
    """Size of the measurement."""

    model: str = ""
    """Folder or hub name; by default the small model that comes along."""
    problems: str = ""
    """JSON lines with `question` and `answer`; by default generated word problems."""
    held_out: str = ""
    """The same, for the accuracy greedily and by sampling."""
    examples: Annotated[int, Interval(0)] = 0
    """Short problems of the file that stand solved before every question."""
    computations: Annotated[int, Interval(0)] = 0
    """Most computations of a problem, by GSM8K's marks; 0 for any."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights and of what the model computes."""
    scored_in: Literal["", "float32", "bfloat16"] = ""
    """The same for the estimators; by default `dtype`."""
    asked: Count = 128
    """Problems to ask."""
    group: Annotated[int, Interval(2)] = 8
    """Completions of a problem."""
    evaluated: Count = 128
    """Held-out problems."""
    max_tokens: Count = 200
    """Longest completion."""
    temperature: Annotated[float, POSITIVE] = 1.0
    """Of sampling."""
    judged: Annotated[int, Interval(2)] = 40
    """Right completions, and as many wrong ones, whose spans are continued from."""
    continuations: Annotated[int, Interval(2)] = 16
    """Continuations before and after each span."""
    costly: Annotated[int, Interval(0)] = 80
    """Completions that OAR-G and OAR-P score; 0 for none."""
    credited: Count = 1024
    """Completions, of as many problems as can be, that are masked for the tables of section 4.3."""
    at_once: Count = 16
    """Problems of a piece, whose completions are sampled together."""
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        check_fields(self)


def run(pieces: Pieces, folder: Path, settings: PretrainedSettings) -> dict[str, Any]:
    """Measure, piece by piece, and sum up: the document that `markdown` writes."""
    scored_in, model = settings.scored_in or settings.dtype, settings.model or str(ASSETS)
    subject, scorer = (
        Subject(model, max_tokens=settings.max_tokens, temperature=settings.temperature, dtype=dtype)
        for dtype in (settings.dtype, scored_in)
    )
    problems, held_out = read_problems(
        subject.tokenizer, settings.problems, settings.held_out, examples=settings.examples,
        computations=settings.computations, count=max(settings.asked, settings.evaluated),
    )  # fmt: skip
    problems, held_out = problems[: settings.asked], held_out[: settings.evaluated]

    def parts(name: str, count: int, work: Callable[[slice], list[Any]], size: int = settings.at_once) -> list[Any]:
        """Results of a piece of work for each `size` of things, one after the other."""
        found = list[Any]()
        for start in range(0, count, size):
            part = slice(start, min(start + size, count))
            found += pieces.get(f"{name} {part.start} to {part.stop}", lambda: work(part))  # noqa: B023
            print(f"{name}: {part.stop} of {count}", flush=True)
        return found

    sampled_on = pieces.get("sampled on", lambda: describe_environment(subject.model.device, None)["device"])
    rolled = parts("rollouts", len(problems), lambda part: roll(subject, problems, part, settings))
    accuracy = {
        name: parts(f"held out {name}", len(held_out), lambda part: evaluate(subject, held_out[part], greedy), 128)  # noqa: B023
        for name, greedy in (("greedily", True), ("by sampling", False))
    }
    cases = continuations.cases_of(rolled, problems, subject.tokenizer, settings.judged)
    few = -(-settings.at_once // 4)  # each is continued from many places
    answers = parts(
        "continued", len(cases),
        lambda part: continuations.continued(subject, cases[part], settings.continuations, settings.seed + part.start),
        few,
    )  # fmt: skip
    scored_on = pieces.get("scored on", lambda: describe_environment(scorer.model.device, None)["device"])
    forward = functools.cache(lambda start, stop: continuations.fed(scorer, cases[start:stop]))
    scores = {
        name: parts(
            f"{name} in {scored_in}", count,
            lambda part: continuations.judged(scorer, name, cases[part], lambda: forward(part.start, part.stop)), few,  # noqa: B023
        )
        for name in (continuations.FORWARD, *continuations.METHODS)
        if (count := min(settings.costly, len(cases)) if name in continuations.COSTLY else len(cases))
    }  # fmt: skip
    spread = rolled[:: max(1, len(rolled) // settings.credited)][: settings.credited]
    masked = parts(
        f"masked in {scored_in}, of {len(spread)}", len(spread), lambda part: mask(scorer, problems, spread[part]), few
    )
    for one, completion in zip(masked, spread, strict=True):
        ids = completion["ids"]
        one["texts"] = [subject.tokenizer.decode(ids[slice(*span)]) for span in one["spans"]]
        one["right"] = bool(completion["reward"])
    return {
        "settings": asdict(settings), "sampled on": sampled_on, "scored on": scored_on,
        "policy": policy(rolled, subject.tokenizer, settings.group),
        "held out": {name: bootstrap_interval(np.mean, rows)._asdict() for name, rows in accuracy.items()},
        "truth": continuations.summed(subject, cases, answers, scores),
        "work": continuations.work(scores),
        "drops": drops.tabulated([one for one in masked if one["spans"]]),
    }  # fmt: skip


def roll(subject: Subject, problems: Sequence[Problem], part: slice, settings: PretrainedSettings) -> list[Any]:
    """Sample groups of completions of some of the problems."""
    torch.manual_seed(settings.seed + part.start)
    numbers, ends = range(len(problems))[part], end_ids(subject.model, subject.tokenizer)
    asked = [number for number in numbers for _ in range(settings.group)]
    rows, rewards = subject.answered([problems[number] for number in asked])
    if part.start == 0:
        require_mixed(torch.tensor(rewards).view(-1, settings.group))
    return [
        {"problem": number, "ids": row.tolist(), "ended": int(row[-1]) in ends, "reward": reward}
        for number, row, reward in zip(asked, rows, rewards, strict=True)
    ]


def evaluate(subject: Subject, problems: Sequence[Problem], greedy: bool) -> list[float]:
    """Answer each problem once; rewards."""
    torch.manual_seed(0)
    return subject.answered(problems, greedy=greedy)[1]


def mask(subject: Subject, problems: Sequence[Problem], rolled: Rolled) -> list[Any]:
    """Credit completions as the paper does: `spans`, `drop` of each, `weights` of all tokens, the reasoning's `end`."""
    rows = Rows(
        [torch.tensor(problems[one["problem"]].prompt) for one in rolled], [torch.tensor(one["ids"]) for one in rolled]
    )
    credit = counterfactual_credit(subject.model, subject.tokenizer, rows, config=CounterfactualConfig())
    return [
        {"spans": [list(span) for span in credit.spans[b]], "drop": credit.drop[b].tolist(),
         "weights": credit.weights[b].tolist(), "end": answer.start if (answer := credit.answers[b]) else 0}
        for b in range(len(rows))
    ]  # fmt: skip


def policy(rolled: Rolled, tokenizer: Any, group: int) -> dict[str, Any]:
    """How often the completions are right, how they end, and what the detectors find in them."""
    found = [*find_reasoning({i: one["ids"] for i, one in enumerate(rolled)}, tokenizer, unanswered=True).values()]
    rewards = np.array([one["reward"] for one in rolled]).reshape(-1, group)
    lengths, ended, answered = (
        np.array(column, float)
        for column in zip(
            *((len(one["ids"]), one["ended"], row.answer is not None) for one, row in zip(rolled, found, strict=True)),
            strict=True,
        )
    )
    counts, held = np.array([(len(row.spans), sum(end - start for start, end in row.spans)) for row in found]).T
    mixed = (rewards != rewards[:, :1]).any(1).astype(float)
    return {
        "completions": len(rolled),
        "right": bootstrap_interval(np.mean, [*rewards])._asdict(),
        "groups with right and wrong ones": bootstrap_interval(np.mean, mixed.tolist())._asdict(),
        "ended": ended.mean(), "answer found": answered.mean(), "answer found where ended": answered[ended == 1].mean(),
        "tokens": lengths.mean(), "tokens by quarters": np.quantile(lengths, (0.25, 0.5, 0.75)).tolist(),
        "spans": counts.mean(), "three spans or more": (counts >= continuations.FEWEST).mean(),
        "tokens in spans": held.sum() / lengths.sum(),
    }  # fmt: skip


def markdown(document: Mapping[str, Any]) -> str:
    """The tables of the command."""
    settings, policy = document["settings"], document["policy"]
    held_out = ", ".join(f"{_percent(figure)} {name}" for name, figure in document["held out"].items())
    said = [
        f"{policy['completions']} completions of {settings['asked']} problems behind {settings['examples']} examples, "
        f"at temperature {settings['temperature']:g}: {_percent(policy['right'])} right; "
        f"{_percent(policy['groups with right and wrong ones'])} of the groups of {settings['group']} have right and "
        f"wrong ones. On {settings['evaluated']} held-out problems: {held_out}.",
        f"{policy['ended']:.0%} end within {settings['max_tokens']} tokens; {policy['tokens']:.0f} tokens in the mean. "
        f"An answer is found in {policy['answer found']:.0%}, and in {policy['answer found where ended']:.0%} of those "
        f"that end; {policy['spans']:.1f} spans a completion hold {policy['tokens in spans']:.0%} of the tokens.",
    ]
    return "\n".join([
        f"# A pretrained model\n\n{made_by(document)}. Model `{settings['model']}`, sampled in {settings['dtype']} on "
        f"{document['sampled on']['name']}, scored in {settings['scored_in'] or settings['dtype']} on "
        f"{document.get('scored on', document['environment']['device'])['name']}.\n",
        *(f"{one}\n" for one in said), continuations.markdown(document), drops.markdown(document["drops"]),
    ])  # fmt: skip


def _percent(figure: Mapping[str, float]) -> str:
    return f"{figure['value']:.1%} ({figure['low']:.1%} to {figure['high']:.1%})"
