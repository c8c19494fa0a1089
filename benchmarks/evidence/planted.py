"""`python -m benchmarks evidence planted`: measure which methods find what was planted, and what matters for learning.

`planted_tables.py` writes the results. Every piece of work is a line of the ledger.
"""

import functools
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.evidence.agreement import Rows, agreement, auroc_alone, correlation
from benchmarks.evidence.cases import Case, planted_case, sampled_case
from benchmarks.evidence.methods import METHODS, Method, Question, Siblings, siblings
from benchmarks.evidence.models import RANDOM, TRAINED, Subject
from benchmarks.evidence.problems import KINDS, PlantedProblem, generate
from benchmarks.evidence.rollouts import right_chains, step_values, substitution_oracle
from benchmarks.harness.ledger import Ledger
from cfa_kernels import score_counterfactuals

STEP_VALUES = "Monte Carlo"
"""The step advantage by sampling, judged like a method against the planted truths."""
CHANCE = "random"
"""Numbers that know nothing, many draws of them: a row beside the methods."""

Values = dict[str, list[list[float]] | None]
"""By method a row for each problem; None for `CHANCE`."""


@dataclass(frozen=True)
class Settings:
    """Size of the measurement. Equal batches are taken from the ledger, so more problems cost only the new ones."""

    problems: int = 200
    """Planted problems that every method judges, the kinds in turn."""
    costly: int = 100
    """How many of them the costly methods judge."""
    valued: int = 80
    """How many of them also get sampled step values."""
    samples: int = 16
    """Continuations per boundary of those."""
    chains: int = 60
    """Problems decoded greedily for the oracle; those that come out right are used."""
    batch: int = 20
    """Problems per piece of work."""
    seed: int = 0
    room: int = 256
    """Most tokens of a completion."""
    draws: int = 1000
    """Bootstrap draws."""

    def __post_init__(self) -> None:
        """Reject values outside their range, naming the setting."""
        for name in ("problems", "samples", "batch", "room", "draws"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("costly", "valued", "chains", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True)
class Batch:
    """Some planted problems in tokens, and a digest that tells them from others."""

    problems: list[PlantedProblem]
    cases: list[Case]
    seed: int
    digest: str

    @property
    def gold(self) -> list[int]:
        return [problem.gold for problem in self.problems]

    @property
    def answers(self) -> list[int]:
        return [problem.answer for problem in self.problems]


def batches(settings: Settings, subject: Subject, count: int) -> Iterator[Batch]:
    """The first `count` planted problems, batch by batch."""
    problems = list(itertools.islice(generate("test", settings.seed), count))
    for start in range(0, count, settings.batch):
        some = problems[start : start + settings.batch]
        text = "\n".join(f"{problem.question}\n{problem.solution}" for problem in some)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        cases = [planted_case(problem, subject.tokenizer) for problem in some]
        yield Batch(some, cases, settings.seed * 1_000_003 + start, digest)


def run(
    models: Mapping[str, Sequence[Subject]],
    ledger: Ledger,
    settings: Settings,
    *,
    methods: Sequence[str] | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Do what the ledger does not hold yet and sum everything up.

    Args:
        models: by name the trained model, by itself, and random ones, which take turns batch by batch.
        methods: names out of `METHODS`; by default all that approximate no other.
        say: is told what is being done.

    Returns:
        The document that `planted_tables.py` writes.

    Raises:
        ValueError: an unknown method.
    """
    chosen = methods_named(methods or [name for name in METHODS if not METHODS[name].approximates])
    document: dict[str, Any] = {"settings": asdict(settings), "models": {}}
    for name, subjects in models.items():
        say(f"== {name} model")
        document["models"][name] = _judge(subjects, ledger, settings, chosen, say)
    return document


def methods_named(names: Sequence[str]) -> dict[str, Method]:
    """The methods of these names.

    Raises:
        ValueError: an unknown name.
    """
    for name in names:
        if name not in METHODS:
            raise ValueError(f"methods must be among {', '.join(METHODS)}, got {name!r}")
    return {name: METHODS[name] for name in names}


def _judge(
    subjects: Sequence[Subject],
    ledger: Ledger,
    settings: Settings,
    chosen: dict[str, Method],
    say: Callable[[str], None],
) -> dict[str, Any]:
    subject = subjects[0]
    everything = list(batches(settings, subject, settings.problems))
    problems = [problem for batch in everything for problem in batch.problems]
    results: dict[str, Any] = {
        "fingerprints": [one.fingerprint for one in subjects],
        "accuracy": subject.accuracy,
        "answer_probability": _answer_probability(subjects, ledger, everything),
        "methods": {},
    }
    values: Values = {CHANCE: None}
    free = {"problems": len(problems), "tokens_fed": 0, "cpu_seconds": 0.0}
    results["methods"][CHANCE] = _truths(None, problems, settings) | free
    for name, method in chosen.items():
        if method.siblings and subject.name == RANDOM:
            continue
        say(name)
        found = ask(name, method, subjects, ledger, settings, everything)
        values[name] = rows = found.pop("values")
        results["methods"][name] = _truths(rows, problems[: found["problems"]], settings) | found
    if subject.name == TRAINED:
        results |= _step_values(subject, ledger, settings, values, say)
        results["oracle"] = _oracle(subject, ledger, settings, chosen, say)
    return results


def ask(
    name: str,
    method: Method,
    subjects: Sequence[Subject],
    ledger: Ledger,
    settings: Settings,
    everything: Sequence[Batch],
) -> dict[str, Any]:
    """Ask a method about all problems, or the first ones if it is costly, and count what that took.

    Several models take turns batch by batch.
    """
    total = sum(len(batch.problems) for batch in everything)
    count = min(settings.costly, total) if method.costly else total
    asked = everything[: math.ceil(count / settings.batch)]
    records = [
        _found(subject, ledger, batch, name, method, settings)
        for subject, batch in zip(itertools.cycle(subjects), asked, strict=False)
    ]
    values = [row for record in records for row in record["values"]]
    return {
        "values": values,
        "problems": len(values),
        "tokens_fed": sum(record["tokens_fed"] for record in records),
        "cpu_seconds": sum(record["cpu_seconds"] for record in records),
    }


def _found(
    subject: Subject, ledger: Ledger, batch: Batch, name: str, method: Method, settings: Settings
) -> dict[str, Any]:
    key = ("siblings", subject.fingerprint, batch.digest, batch.seed)

    def known(question: Question) -> Siblings:
        return Siblings(**ledger.get(key, lambda: siblings(question)._asdict()))

    question = Question(subject, batch.cases, batch.gold, batch.seed, settings.room, known)
    return ledger.get(("found", subject.fingerprint, name, batch.digest, batch.seed), lambda: _asked(method, question))


def _asked(method: Method, question: Question) -> dict[str, Any]:
    started = time.process_time()
    found = method.run(question)
    seconds = time.process_time() - started
    values = [row.tolist() for row in found.values]
    for b, (row, case) in enumerate(zip(values, question.cases, strict=True)):
        if len(row) != len(case.units) or not np.isfinite(row).all():
            raise ValueError(f"row {b}: a method must give {len(case.units)} finite numbers, got {row}")
    return {"values": values, "tokens_fed": found.tokens_fed, "cpu_seconds": seconds}


def _answer_probability(subjects: Sequence[Subject], ledger: Ledger, everything: Sequence[Batch]) -> float:
    """Mean probability of the answers as they stand, given all that stands before them."""

    def work(subject: Subject, batch: Batch) -> dict[str, Any]:
        scores = score_counterfactuals(
            subject.model, [case.prompt for case in batch.cases], [case.completion for case in batch.cases],
            [[] for _ in batch.cases], [case.answer for case in batch.cases],
            placeholder_id=subject.tokenizer.pad_token_id,
        )  # fmt: skip
        return {"probability": scores.base.exp().tolist()}

    records = [
        ledger.get(("answers", subject.fingerprint, batch.digest), functools.partial(work, subject, batch))
        for subject, batch in zip(itertools.cycle(subjects), everything, strict=False)
    ]
    return float(np.mean([p for record in records for p in record["probability"]]))


def _truths(values: Rows | None, problems: Sequence[PlantedProblem], settings: Settings) -> dict[str, Any]:
    """Agreement with the planted truths, over all problems and kind by kind."""

    def rows(truth: str, kinds: Sequence[str]) -> tuple[Rows | None, list[list[bool]]]:
        some = [i for i, problem in enumerate(problems) if problem.kind in kinds]
        labels = [[bool(getattr(unit, truth)) for unit in problems[i].units] for i in some]
        return _of(values, some), labels

    def judged(truth: str, kinds: Sequence[str]) -> dict[str, Any]:
        scores, labels = rows(truth, kinds)
        if not any(0 < sum(row) < len(row) for row in labels):
            return {"problems": 0}
        return agreement(scores, labels, draws=settings.draws)

    return {
        "direct": judged("direct", KINDS),
        "total": judged("total", KINDS),
        "origin": judged("origin", ("wrong",)),
        "kinds": {kind: {truth: auroc_alone(*rows(truth, (kind,))) for truth in ("direct", "total")} for kind in KINDS},
    }


def _step_values(
    subject: Subject,
    ledger: Ledger,
    settings: Settings,
    values: Values,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Sampled step advantages: as a truth for every method, and judged as a method themselves."""
    count = min(settings.valued, settings.problems)
    if not count:
        return {}
    say(f"{STEP_VALUES}: {settings.samples} continuations after every line of {count} problems")
    found, problems, started = [], [], []
    for batch in batches(settings, subject, count):
        key = ("values", subject.fingerprint, batch.digest, batch.seed, settings.samples)
        record = ledger.get(
            key,
            lambda batch=batch: {
                "shares": step_values(
                    subject, batch.cases, batch.answers, batch.gold, samples=settings.samples, seed=batch.seed,
                    room=settings.room,
                )
            },
        )  # fmt: skip
        found += record["shares"]
        problems += batch.problems
        started += [shares["right"][0] for shares in record["shares"]]
    own = [np.diff(shares["own"]).tolist() for shares in found]
    reward = [np.abs(np.diff(shares["right"])).tolist() for shares in found]
    right = [problem.answer == problem.gold for problem in problems]

    def against(truths: Sequence[Sequence[float]], rows: Sequence[int]) -> dict[str, Any]:
        found = {}
        for name, scores in values.items():
            some = [i for i in rows if scores is None or i < len(scores)]  # a costly method has judged fewer
            found[name] = correlation(_of(scores, some), [truths[i] for i in some], draws=settings.draws)
        return found

    return {
        "sampled_accuracy": float(np.mean(started)),
        "step_values": {
            "own": against(own, range(count)),
            "own, right completions": against(own, [i for i in range(count) if right[i]]),
            "own, wrong completions": against(own, [i for i in range(count) if not right[i]]),
            "reward, absolute": against(reward, range(count)),
        },
        "step_values_as_method": _truths(own, problems, settings),
    }


def _oracle(
    subject: Subject, ledger: Ledger, settings: Settings, chosen: dict[str, Method], say: Callable[[str], None]
) -> dict[str, Any]:
    """Token substitution on right greedy chains, and every method that judges tokens against it."""
    if not settings.chains:
        return {}
    say(f"oracle: every token of the right ones of {settings.chains} greedy chains")
    chains: list[dict[str, Any]] = []
    values: dict[str, list[list[float]]] = {name: [] for name, method in chosen.items() if not method.siblings}
    for batch in batches(settings, subject, settings.chains):
        key = (subject.fingerprint, batch.digest)
        record = ledger.get(("chains", *key), lambda batch=batch: _chains(subject, batch, settings))
        chains += record["chains"]
        if not record["chains"]:
            continue
        cases = [
            sampled_case(batch.cases[chain["problem"]].prompt.tolist(), chain["completion"], subject.tokenizer)
            for chain in record["chains"]
        ]
        gold = [batch.gold[chain["problem"]] for chain in record["chains"]]
        question = Question(subject, cases, gold, batch.seed, settings.room, siblings)
        for name in values:
            method = chosen[name]
            values[name] += ledger.get(
                ("tokens", name, *key), lambda method=method, question=question: _asked(method, question)
            )["values"]
    critical = [chain["critical"] for chain in chains]
    usable = [i for i, row in enumerate(critical) if 0 < sum(row) < len(row)]
    summary: dict[str, Any] = {
        "tried": settings.chains,
        "right": len(chains),
        "with_critical_tokens": len(usable),
        "tokens": sum(map(len, critical)),
        "critical_share": _share(critical),
        "control_share": _share([chain["control"] for chain in chains]),
        "methods": {},
    }
    if usable:
        labels = [critical[i] for i in usable]
        for name, rows_of in {CHANCE: None, **values}.items():
            summary["methods"][name] = agreement(_of(rows_of, usable), labels, draws=settings.draws, shares=(0.1, 0.2))
    return summary


def _of(rows: Rows | None, some: Sequence[int]) -> Rows | None:
    """Some of the rows; None of none."""
    return None if rows is None else [rows[i] for i in some]


def _chains(subject: Subject, batch: Batch, settings: Settings) -> dict[str, Any]:
    chains = right_chains(subject, [problem.question for problem in batch.problems], batch.gold, room=settings.room)
    return {
        "chains": [
            {"problem": i, "completion": case.completion.tolist()}
            | substitution_oracle(subject, case, batch.gold[i], room=settings.room)
            for i, case in chains
        ]
    }


def _share(rows: Sequence[Sequence[bool]]) -> float | None:
    flat = [flag for row in rows for flag in row]
    return float(np.mean(flat)) if flat else None
