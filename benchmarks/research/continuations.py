"""What each span of a completion adds to the chance of an answer, by continuing what stands before it and after it.

That is what credit claims to measure; estimators are compared with it span by span, within a completion.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.results import interval, table
from benchmarks.research.agreement import AUROC, SPEARMAN, agreement
from benchmarks.research.methods import judge, length, position
from benchmarks.research.models import Problem, Subject, clock
from cfa_kernels import Rows as TokenRows
from cfa_kernels import Span, find_answer, packed_forward
from cfa_kernels.estimators import Entropy, Gradient, Masking, PrefixGain
from cfa_kernels.estimators.base import Estimator, OwnFunction
from cfa_kernels.scoring.packed import PackedForward
from cfa_kernels.text.find import Reasoning, find_reasoning
from trainer.rewards.numbers import gold_number

FEWEST = 3
"""Spans of a completion that is judged."""
MOVES = 0.2
"""Change of the chance from which on a span counts as one that matters."""
REFERENCE, OTHER_HALF, CHANCE = "prefix gain, reference answer", "other half of the continuations", "random"
FORWARD = "a forward of the completions"
METHODS: dict[str, Estimator] = {
    "CF": Masking(), "prefix gain": PrefixGain(), REFERENCE: PrefixGain(),
    "CF, spans dropped": Masking(mask="drop"),
    "position": OwnFunction(position), "length": OwnFunction(length), "entropy": Entropy(),
    "OAR-G": Gradient("mean"), "OAR-P": Masking(outcome="mean"),
}  # fmt: skip
"""By name. OAR-P judges each token, a span's importance is the mean over its own; for the method of that name the
reference answer stands in place of the sampled one."""
COSTLY = "OAR-G", "OAR-P"
"""Methods that may score fewer completions than the others: the first ones."""
PLACES = "last", "last but one", "earlier"


class Case(NamedTuple):
    """A completion to judge."""

    number: int  # among the rollouts
    problem: Problem
    completion: Tensor  # (T,) int64
    reasoning: Reasoning
    right: bool
    edges: list[tuple[int, int]]  # tokens before and after each span


def cases_of(
    rolled: Sequence[Mapping[str, Any]], problems: Sequence[Problem], tokenizer: Any, count: int
) -> list[Case]:
    """Choose so many right and so many wrong completions, in turn, at most one of each of a problem.

    They ended, have an answer and enough spans, and their problems have right and wrong ones.
    """
    chosen: dict[bool, dict[int, Case]] = {True: {}, False: {}}
    solved, failed = ({one["problem"] for one in rolled if bool(one["reward"]) == right} for right in (True, False))
    for number, one in enumerate(rolled):
        right, i, completion = bool(one["reward"]), one["problem"], torch.tensor(one["ids"])
        if not one["ended"] or i not in solved & failed or i in chosen[right] or len(chosen[right]) == count:
            continue
        reasoning = find_reasoning({number: completion}, tokenizer)[number]
        if reasoning.answer and len(reasoning.spans) >= FEWEST:
            edges = _edges(completion, reasoning.spans, tokenizer)
            chosen[right][i] = Case(number, problems[i], completion, reasoning, right, edges)
    if not (chosen[True] and chosen[False]):
        raise ValueError(
            f"asked: of {len(rolled)} completions {len(chosen[True])} right and {len(chosen[False])} wrong ones can be "
            f"judged (they ended with an answer, have {FEWEST} spans or more and a sibling of the other kind), and one "
            "of each is needed; ask more problems, or raise max_tokens"
        )
    pairs = zip(chosen[True].values(), chosen[False].values(), strict=False)
    return [case for pair in pairs for case in pair]


def _edges(completion: Tensor, spans: Sequence[Span], tokenizer: Any) -> list[tuple[int, int]]:
    """Tokens before and after each span; what stands between two without a word belongs to the later one."""
    edges, last = list[tuple[int, int]](), spans[0].start
    for start, end in spans:
        words = any(map(str.isalnum, tokenizer.decode(completion[last:start])))
        edges.append((start if words else last, end))
        last = end
    return edges


def continued(subject: Subject, cases: Sequence[Case], count: int, seed: int) -> list[dict[str, list[str | None]]]:
    """Continue each case from each edge of its spans: by edge the numbers that `count` continuations give."""
    torch.manual_seed(seed)
    begun = [(i, cut) for i, case in enumerate(cases) for cut in sorted({*sum(case.edges, ())})]
    rows = subject.completed(
        [cases[i].problem.prompt for i, _ in begun for _ in range(count)],
        [cases[i].completion[:cut] for i, cut in begun for _ in range(count)],
    )
    answers: list[dict[str, list[str | None]]] = [{} for _ in cases]
    for n, (i, cut) in enumerate(begun):
        numbers = [subject.number(row) for row in rows[n * count : (n + 1) * count]]
        answers[i][str(cut)] = [None if number is None else str(number) for number in numbers]
    return answers


def fed(subject: Subject, cases: Sequence[Case]) -> PackedForward:
    """Feed completions; estimators continue this forward, as those of a training step do."""
    rows = TokenRows([torch.tensor(case.problem.prompt) for case in cases], [case.completion for case in cases])
    with torch.no_grad():
        return packed_forward(subject.model, rows, keep_states=True)


def judged(
    subject: Subject, name: str, cases: Sequence[Case], forward: Callable[[], PackedForward]
) -> list[dict[str, Any]]:
    """Importances of each case's spans by a method, `values`, with an equal share of the `tokens` and `seconds`.

    They are those beyond the forward, or the forward's own.
    """
    reasoning, completions = [case.reasoning for case in cases], [case.completion for case in cases]
    if name != FORWARD:
        own = forward()
    if name == REFERENCE:
        problems = [case.problem for case in cases]
        for i, target in enumerate(reference_answers(own.rows, problems, subject.tokenizer)):
            start = reasoning[i].answer.start  # type: ignore[union-attr]
            assert target is not None
            completions[i] = torch.cat([completions[i][:start], target])
            reasoning[i] = reasoning[i]._replace(answer=Span(start, start + len(target)))
    began = clock(subject.model.device)
    if name == FORWARD:
        tokens, values = forward().tokens_fed, [torch.zeros(0)] * len(cases)
    else:
        rows = TokenRows(own.rows.prompts, completions)
        values, tokens = judge(METHODS[name], subject, rows, reasoning, single=name == "OAR-P", forward=own)
    seconds = clock(subject.model.device) - began
    return [{"values": row.tolist(), "tokens": tokens / len(cases), "seconds": seconds / len(cases)} for row in values]


def reference_answers(rows: TokenRows, problems: Sequence[Problem], tokenizer: Any) -> list[Tensor | None]:
    """Tokens of the right answer for each completion, to score in place of its own; None where it has none."""
    targets = list[Tensor | None]()
    for row, problem in zip(rows.completions, problems, strict=True):
        ids = torch.tensor(tokenizer(f"#### {problem.answer}")["input_ids"])
        span, own = find_answer(ids, tokenizer), find_answer(row, tokenizer)
        targets.append(None if own is None or span is None else ids[slice(*span)])
    return targets


def gains(case: Case, answers: Mapping[str, Sequence[str | None]], number: str) -> np.ndarray:
    """What each span adds to the chance of a number, by continuation, (spans, continuations)."""
    hits = {int(cut): np.array([one == number for one in row], float) for cut, row in answers.items()}
    return np.array([hits[after] - hits[before] for before, after in case.edges])


def summed(
    subject: Subject, cases: Sequence[Case], answers: Sequence[Mapping[str, Sequence[str | None]]],
    judgements: Mapping[str, Sequence[Mapping[str, Any]]], draws: int = 1000,
) -> dict[str, Any]:  # fmt: skip
    """Compare methods with what spans add, on right and on wrong completions apart.

    Of each kind: by method its agreement with the gain of the right answer's chance, on wrong ones also with that of
    the completion's own answer, and with its falls; how the right answer's gains are spread over places.
    """
    result: dict[str, Any] = {}
    for kind, right in (("right", True), ("wrong", False)):
        some = [i for i, case in enumerate(cases) if case.right == right]
        numbers = {
            "right answer": [str(gold_number(cases[i].problem.answer)) for i in some],
            "own answer": [str(subject.number(cases[i].completion)) for i in some],
        }
        of = {
            name: [gains(cases[i], answers[i], number) for i, number in zip(some, column, strict=True)]
            for name, column in numbers.items()
        }
        methods = {
            name: rows for name in METHODS
            if (rows := [row["values"] for i in some for row in judgements.get(name, ())[i : i + 1]])
        }  # fmt: skip
        one = result[kind] = {"completions": len(some), "spans": sum(len(cases[i].edges) for i in some), "methods": {}}
        one["places"] = {name: places(rows) for name, rows in methods.items()}
        one["places"] |= {name: places([row.mean(1) for row in rows]) for name, rows in of.items()}
        truths = {"right answer": of["right answer"]} if right else of
        for name, rows in {**methods, OTHER_HALF: (), CHANCE: None}.items():
            figures = one["methods"][name] = {}
            for truth, halves in truths.items():
                whole = [row.mean(1) for row in halves][: len(rows) if name in COSTLY else None]
                if name == OTHER_HALF:
                    rows, whole = ([row[:, half::2].mean(1) for row in halves] for half in (0, 1))
                for key, figure, labels in (
                    ("spearman", SPEARMAN, whole), ("gain", AUROC, [row >= MOVES for row in whole]),
                    ("fall", AUROC, [row <= -MOVES for row in whole]),
                ):  # fmt: skip
                    found = agreement(rows, [row.astype(float).tolist() for row in labels], figure, draws=draws)
                    figures[f"{truth}, {key}"] = (found.get("auroc") or found.get("spearman"), found["problems"])
    return result


def places(rows: Sequence[Sequence[float] | np.ndarray]) -> dict[str, float]:
    """Share of what is positive, in means over completions, at the last span, the last but one and earlier ones."""
    positive = [np.clip(np.asarray(row, float), 0, None)[::-1] for row in rows]
    shares = [row / row.sum() for row in positive if row.sum() > 0]
    cut = [(row[0], row[1:2].sum(), row[2:].sum()) for row in shares]
    return dict(zip(PLACES, np.mean(cut, 0).tolist(), strict=True)) if cut else {}


def work(judgements: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Tokens and seconds of each method for a completion."""
    return {
        name: {key: float(np.mean([one[key] for one in rows])) for key in ("tokens", "seconds")}
        for name, rows in judgements.items()
    }


def markdown(document: Mapping[str, Any]) -> str:
    """The tables of `summed` and `work`."""
    parts = [
        "# What a span adds to the chance of an answer\n\n"
        f"By {document['settings']['continuations']} continuations before and after each span. Spearman and AUROC in "
        "a completion, 95 % intervals over completions; AUROC is free of position. *Gain* tells spans that add "
        f"{MOVES} or more from the others, *fall* those that take as much away, high where a method finds them. *Other "
        "half*: what one half of the continuations says of the other, the most that can be asked of a method. *n*: "
        f"completions in which the truth is not constant. {' and '.join(COSTLY)}: of "
        f"{document['settings']['costly']} completions at most, the first.\n"
    ]  # fmt: skip
    for kind, one in document["truth"].items():
        names = list(one["methods"][CHANCE])
        rows = [[method, *(interval(found[name][0]) for name in names)] for method, found in one["methods"].items()]
        head = ["method", *(f"{name}, n={one['methods'][CHANCE][name][1]}" for name in names)]
        parts += [f"## On {kind} completions: {one['completions']}, {one['spans']} spans\n", table(head, rows)]
        rows = [[name, *(f"{share:.0%}" for share in found.values())] for name, found in one["places"].items() if found]
        parts.append(table(["where what is positive lies", *PLACES], rows))
    rows = [[name, f"{one['tokens']:.0f}", f"{one['seconds']:.3f}"] for name, one in document["work"].items()]
    parts += ["## Cost, a completion, beyond the forward\n", table(["", "tokens fed", "seconds"], rows)]
    return "\n".join(parts)
