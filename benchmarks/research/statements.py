"""`python -m benchmarks evidence statements`: which statements of a program draw the credit, and which its tests need.

A model writes programs for small tasks of the project's own. Behind each program that passes its tests stands a call
that no prompt shows, and its value is the answer that methods look at. A statement's effect is the share of the tests
that fail once it is deleted.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import torch

from benchmarks.harness.results import Pieces, interval, made_by, table
from benchmarks.research.agreement import SPEARMAN, agreement
from benchmarks.research.continuations import METHODS
from benchmarks.research.models import Problem, Subject
from cfa_kernels import (
    CounterfactualConfig,
    ModelAccess,
    Probe,
    Rows,
    Span,
    SpanRules,
    counterfactual_credit,
    packed_forward,
)
from cfa_kernels.options import POSITIVE, Count, check_fields
from trainer.analyze.statistics import bootstrap_interval
from trainer.data import encode_prompt
from trainer.rewards.built_in import INSTRUCTIONS
from trainer.rewards.code import CodeReward, mbpp_row
from trainer.settings import ASSETS

TASKS = Path(__file__).parent / "assets" / "tasks.jsonl"
SHOWN = 2
"""Tests of a task that its prompt shows."""
SECONDS = 2.0
"""For a program's tests; without a statement it may never end."""
CHOSEN = "CF", "prefix gain", "position", "length"
KINDS = {"def": r"(?:async )?def\b", "return, print": r"(?:return|print|yield)\b", "header": r".*:\Z", "other": ""}
"""Kinds of statements, by how they begin; the first that matches."""
SPANS = SpanRules("python", max_spans=32)
DELETED = "return, print", "other"
"""Kinds that can be deleted so that a program remains."""


@dataclass(frozen=True)
class StatementsSettings:
    """Size of the measurement."""

    model: str = ""
    """Folder or hub name; by default the small model that comes along, which writes no programs."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights and of what the model computes."""
    group: Count = 4
    """Programs for a task."""
    max_tokens: Count = 256
    """Longest completion."""
    temperature: Annotated[float, POSITIVE] = 0.7
    """Of sampling."""
    isolation: Literal["bubblewrap", "none"] = "bubblewrap"
    """How programs are isolated where their tests run."""
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        check_fields(self)


def run(pieces: Pieces, folder: Path, settings: StatementsSettings) -> dict[str, Any]:
    """Sample programs, judge the statements of those that pass, and sum up: the document that `markdown` writes."""
    reward = CodeReward(timeout=SECONDS, isolation=settings.isolation)
    tasks = [json.loads(line) for line in TASKS.read_text(encoding="utf-8").splitlines()]
    asked = [task for task in tasks for _ in range(settings.group)]
    subject = Subject(
        settings.model or str(ASSETS), max_tokens=settings.max_tokens, temperature=settings.temperature,
        dtype=settings.dtype,
    )  # fmt: skip
    prompts = [posed(task, subject.tokenizer).prompt for task in asked]

    def sampled() -> list[list[int]]:
        torch.manual_seed(settings.seed)
        return [row.tolist() for row in subject.completed(prompts)]

    rows = pieces.get("programs", sampled)
    texts = [subject.tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    passed = pieces.get("passed", lambda: reward(completions=texts, tests=[all_tests(task) for task in asked]))
    kept = [i for i, (text, one) in enumerate(zip(texts, passed, strict=True)) if one and text.count("```") == 2]
    if not kept:
        raise ValueError(f"model: none of {len(rows)} programs passes its tests; name another model")
    some = Rows([torch.tensor(prompts[i]) for i in kept], [torch.tensor(rows[i]) for i in kept])
    probes = [probe(asked[i], subject.tokenizer) for i in kept]
    with torch.no_grad():
        access = packed_forward(subject.model, some, keep_states=True)
    methods, spans = dict[str, Any](), list[list[list[int]]]()
    for name in CHOSEN:
        one = methods[name] = pieces.get(name, lambda: judge(subject.tokenizer, access, name, some, probes))  # noqa: B023
        spans = one["spans"]
        print(f"{name}: {len(kept)} programs", flush=True)
    parts = [cut(subject.tokenizer, rows[i], own) for i, own in zip(kept, spans, strict=True)]
    effects = pieces.get("effects", lambda: [
        [effect(reward, before, own, after, all_tests(asked[i])) for before, own, after in program]
        for i, program in zip(kept, parts, strict=True)
    ])  # fmt: skip
    kinds = [[kind(own) for _, own, _ in program] for program in parts]
    base = torch.tensor(methods["CF"]["base"])
    least = base - torch.tensor([max(row, default=0.0) for row in methods["CF"]["drop"]])
    return {
        "settings": asdict(settings), "programs": len(rows), "passed": fmean(map(float, passed)), "judged": len(kept),
        "statements": sum(map(len, kinds)), "probability": base.exp().mean().item(),
        "masked": least.exp().mean().item(),
        "methods": {"equal credit": summed([[1.0] * len(row) for row in kinds], kinds, effects)}
        | {name: summed(one["drop"], kinds, effects) for name, one in methods.items()},
    }  # fmt: skip


def posed(task: Mapping[str, Any], tokenizer: Any) -> Problem:
    """Ask a task as MBPP's are asked, with some of its tests."""
    question = mbpp_row({"text": task["task"], "test_list": all_tests(task)[:SHOWN]}, "tasks")["question"]
    return Problem(encode_prompt(question, tokenizer, instruction=INSTRUCTIONS["mbpp"]), task["value"])


def all_tests(task: Mapping[str, Any]) -> list[str]:
    """List all tests of a task, the call of its probe last."""
    return [f"assert {test}" for test in (*task["tests"], f"{task['call']} == {task['value']}")]


def probe(task: Mapping[str, Any], tokenizer: Any) -> Probe:
    """Write a task's call behind a program, and its value to be scored."""
    ask, value = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (f"\n\n`{task['call']}` gives `", task["value"])
    )
    return Probe(torch.tensor(ask + value), Span(len(ask), len(ask + value)))


def judge(tokenizer: Any, access: ModelAccess, name: str, rows: Rows, probes: Sequence[Probe]) -> dict[str, Any]:
    """Importances of the statements of programs by a method: `spans`, `drop` and the answers' `base`."""
    config = CounterfactualConfig(METHODS[name], spans=SPANS)
    credit = counterfactual_credit(access, tokenizer, rows, config=config, probes=probes)
    return {
        "spans": [[list(span) for span in row] for row in credit.spans],
        "drop": [row.tolist() for row in credit.drop], "base": credit.base.tolist(),
    }  # fmt: skip


def cut(tokenizer: Any, row: Sequence[int], spans: Sequence[Sequence[int]]) -> list[tuple[str, str, str]]:
    """Cut a completion at each of its statements: what stands before it, the statement, what stands behind it."""
    found = list[tuple[str, str, str]]()
    for start, end in spans:
        before, own, after = (
            tokenizer.decode(part, skip_special_tokens=True) for part in (row[:start], row[start:end], row[end:])
        )
        first, last = len(own) - len(own.lstrip()), len(own.rstrip())
        found.append((before + own[:first], own[first:last], own[last:] + after))
    return found


def kind(statement: str) -> str:
    """Name the kind of a statement."""
    return next(name for name, pattern in KINDS.items() if re.match(pattern, statement, re.DOTALL))


def effect(reward: CodeReward, before: str, statement: str, after: str, tests: Sequence[str]) -> float | None:
    """Share of the tests that fail without a statement; None for one that cannot be deleted."""
    if kind(statement) not in DELETED:
        return None
    text = f"{before}pass{after}"
    return 1 - fmean(reward(completions=[text] * len(tests), tests=[[test] for test in tests]))  # type: ignore[type-var]


def summed(
    values: Sequence[Sequence[float]], kinds: Sequence[Sequence[str]], effects: Sequence[Sequence[float | None]]
) -> dict[str, Any]:
    """Shares of the positive credit by kind of statement, and agreement with the effects of deleting one."""
    shares = list[dict[str, float]]()
    for row, names in zip(values, kinds, strict=True):
        total = sum(value for value in row if value > 0)
        one = {name: sum(v for v, k in zip(row, names, strict=True) if k == name and v > 0) for name in KINDS}
        shares += [{name: value / total for name, value in one.items()}] if total else []
    result: dict[str, Any] = {
        name: bootstrap_interval(fmean, [one[name] for one in shares])._asdict() if shares else None for name in KINDS
    }
    for name, chosen in (("all", DELETED), ("but return", DELETED[1:])):
        pairs = [
            [(v, e) for v, k, e in zip(*columns, strict=True) if k in chosen]
            for columns in zip(values, kinds, effects, strict=True)
        ]
        result[name] = agreement(*([[pair[i] for pair in row] for row in pairs] for i in (0, 1)), SPEARMAN)
    return result


def markdown(document: Mapping[str, Any]) -> str:
    """The table of the command."""
    methods = document["methods"]
    some = methods["equal credit"]
    note = (
        f"# Which statements of a program draw the credit\n\n{made_by(document)}. Model "
        f"`{document['settings']['model']}`, in {document['settings']['dtype']}: {document['passed']:.0%} of "
        f"{document['programs']} programs pass their tests; judged are {document['judged']}, of one block each, with "
        f"{document['statements']} statements. The value of a call that no prompt shows has a probability of "
        f"{document['probability']:.2f} behind them in the mean, and {document['masked']:.2f} with the statement "
        "masked that it loses most by. Shares of a program's positive credit by kind of statement, in means over "
        "programs; Spearman within a program with the share of tests that fail once a "
        f"statement is deleted: of all statements but headers ({some['all']['problems']} programs in which that "
        f"differs), and of those that return nothing either ({some['but return']['problems']}). 95 % bootstrap "
        "intervals over programs.\n"
    )
    head = ["", *KINDS, "Spearman, all", "Spearman, but return"]
    rows = [
        [name, *(interval(one[k]) for k in KINDS), *(interval(one[k].get("spearman")) for k in ("all", "but return"))]
        for name, one in methods.items()
    ]  # fmt: skip
    return "\n".join([note, table(head, rows)])
