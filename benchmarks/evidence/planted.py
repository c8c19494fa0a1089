"""Measure which estimators find what was planted in generated solutions, and what matters for learning.

`planted_tables.py` writes the results.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.evidence.agreement import Rows, agreement, auroc_alone, correlation
from benchmarks.evidence.cases import PlantedCase, planted_case
from benchmarks.evidence.models import RANDOM, TRAINED, Subject
from benchmarks.evidence.problems import KINDS, PlantedProblem, generate
from benchmarks.harness.results import Pieces
from cfa_kernels import Importances, ScoredBatch, Span, score_counterfactuals
from cfa_kernels.estimators.base import ENTROPIES, SIBLINGS, Estimator, OwnFunction
from cfa_kernels.estimators.entropy import Entropy
from cfa_kernels.estimators.gradient import Gradient
from cfa_kernels.estimators.masking import Masking
from cfa_kernels.estimators.prefix_gain import PrefixGain
from cfa_kernels.estimators.siblings import PrefixTreeValues, SiblingEdits
from cfa_kernels.rows import Rows as TokenRows
from cfa_kernels.scoring.access import InProcess
from trainer.rewards.numbers import final_number
from trainer.rollouts import generate as sample

CHANCE = "random"
"""Numbers that know nothing, many draws of them: a row beside the methods."""
GROUP = 8
"""Completions of a prompt, for estimators that compare them."""
BATCH = 20
"""Problems that are judged together."""
_ROWS = 256  # continuations decoded together


@dataclass(frozen=True)
class Method:
    """Estimator of the library, as it is measured.

    Attributes:
        estimator: judges lines, or tokens.
        by_token: each token of the reasoning is a unit; a line's importance is the mean over its tokens.
        costly: it feeds a forward's worth of tokens per token, so it judges fewer problems.
    """

    estimator: Estimator
    by_token: bool = False
    costly: bool = False

    @property
    def compares(self) -> bool:
        """Whether it compares completions of one prompt, of a model that solves something."""
        return SIBLINGS in self.estimator.needs


def position(model: Any, batch: ScoredBatch) -> Importances:
    """Judge units by their place."""
    return Importances([torch.arange(len(units)).float() for units in batch.units])


def length(model: Any, batch: ScoredBatch) -> Importances:
    """Judge units by their number of tokens."""
    return Importances([torch.tensor([float(unit.end - unit.start) for unit in units]) for units in batch.units])


METHODS = {
    "position": Method(OwnFunction(position)),
    "length": Method(OwnFunction(length)),
    "CF": Method(Masking()),
    "CF, total effect": Method(Masking(effect="total")),
    "CF, KL of mean": Method(Masking(outcome="mean")),
    "OAR-P, mean": Method(Masking(outcome="mean"), by_token=True, costly=True),
    "OAR-P, log-prob": Method(Masking(), by_token=True, costly=True),
    "OAR-G, 1 draw": Method(Gradient("mean", 1e-3, 1)),
    "gradient x input": Method(Gradient("mean_logprob", 0.0)),
    "prefix gain": Method(PrefixGain()),
    "entropy": Method(Entropy()),
    "prefix tree": Method(PrefixTreeValues()),
    "sibling edits": Method(SiblingEdits()),
}


@dataclass(frozen=True)
class PlantedSettings:
    """Size of the measurement."""

    problems: int = 200
    """Planted problems that every method judges, the kinds in turn."""
    costly: int = 60
    """How many of them the costly methods judge."""
    valued: int = 60
    """How many of them also get sampled step values."""
    samples: int = 12
    """Continuations per boundary of those."""
    room: int = 256
    """Most tokens of a completion."""
    draws: int = 1000
    """Bootstrap draws."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Reject values outside their range, naming the setting."""
        for name, value in asdict(self).items():
            least = 0 if name in ("costly", "valued", "seed") else 1
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")


def run(
    models: Mapping[str, Sequence[Subject]], pieces: Pieces, settings: PlantedSettings, *,
    methods: Sequence[str] | None = None, say: Callable[[str], None] = print,
) -> dict[str, Any]:  # fmt: skip
    """Judge planted problems by every method and sum up.

    Args:
        models: by name the trained model, by itself, and random ones, which take turns batch by batch.
        pieces: of each model and method.
        settings: how much.
        methods: names out of `METHODS`, by default all.
        say: prints progress, a line at a time.

    Returns:
        The document that `planted_tables.py` writes.

    Raises:
        ValueError: an unknown method.
    """
    if unknown := [name for name in methods or [] if name not in METHODS]:
        raise ValueError(f"methods must be among {', '.join(METHODS)}, got {', '.join(unknown)}")
    problems = list(itertools.islice(generate("test", settings.seed), settings.problems))
    document: dict[str, Any] = {"settings": asdict(settings), "models": {}}
    for name, subjects in models.items():
        cases = [planted_case(problem, subjects[0].tokenizer) for problem in problems]
        results: dict[str, Any] = {
            "fingerprints": [one.fingerprint for one in subjects],
            "accuracy": subjects[0].accuracy,
            "answer_probability": _answer_probability(subjects, cases),
            "methods": {CHANCE: _truths(None, problems, settings) | {"problems": len(problems), "tokens_fed": 0}},
        }
        values: dict[str, Rows | None] = {CHANCE: None}
        for chosen in methods or METHODS:
            method = METHODS[chosen]
            if method.compares and name == RANDOM:
                continue
            say(f"{name} model: {chosen}")
            count = min(settings.costly, len(cases)) if method.costly else len(cases)
            record = pieces.get(f"{name}, {chosen}", lambda: ask(method, subjects, cases[:count], problems, settings))  # noqa: B023
            values[chosen] = record.pop("values")
            results["methods"][chosen] = _truths(values[chosen], problems[:count], settings) | record
        if name == TRAINED and settings.valued:
            say(f"{name} model: step values")
            results |= _step_values(subjects[0], pieces, cases[: settings.valued], problems, values, settings)
        document["models"][name] = results
    return document


def ask(
    method: Method, subjects: Sequence[Subject], cases: Sequence[PlantedCase], problems: Sequence[PlantedProblem],
    settings: PlantedSettings,
) -> dict[str, Any]:  # fmt: skip
    """Judge cases by a method, and count tokens fed and seconds of the processor. Models take turns batch by batch."""
    values, tokens, started = list[list[float]](), 0, time.process_time()
    for start, subject in zip(range(0, len(cases), BATCH), itertools.cycle(subjects), strict=False):
        some = cases[start : start + BATCH]
        gold = [problem.gold for problem in problems[start : start + BATCH]]
        rows, counts = judge(method, subject, some, gold, seed=settings.seed * 1_000_003 + start, room=settings.room)
        for case, row in zip(some, rows, strict=True):
            if len(row) != len(case.units) or not torch.isfinite(row).all():
                raise ValueError(f"a method must give {len(case.units)} finite numbers, got {row.tolist()}")
        values += [row.tolist() for row in rows]
        tokens += counts
    seconds = time.process_time() - started
    return {"values": values, "problems": len(cases), "tokens_fed": tokens, "cpu_seconds": seconds}


def judge(
    method: Method, subject: Subject, cases: Sequence[PlantedCase], gold: Sequence[int], *, seed: int, room: int
) -> tuple[list[Tensor], int]:
    """Importances (K_b,) of the lines of each case, high where they matter, and the tokens that were fed for them.

    `seed` and `room` are of what the method draws and of the siblings that it compares.
    """
    columns = [_Column(case.prompt, case.completion, b, case) for b, case in enumerate(cases)]
    needs, counts = method.estimator.needs, 0
    if method.compares:
        columns += _siblings(subject, cases, seed=seed, room=room)
        counts += sum(len(one.prompt) + len(one.completion) for one in columns[len(cases) :])
    units = [_units(one.case, method.by_token) for one in columns]
    batch = ScoredBatch.of(
        subject.model, TokenRows([one.prompt for one in columns], [one.completion for one in columns]), units,
        [one.case.answer if one.case else None for one in columns], mask=subject.tokenizer.pad_token_id,
    )  # fmt: skip
    ordered = [columns[i] for i in batch.index]
    texts = [subject.tokenizer.decode(one.completion, skip_special_tokens=True) for one in ordered]
    right = [float(final_number(text) == gold[one.group]) for text, one in zip(texts, ordered, strict=True)]
    entropies = [_entropies(subject, one) for one in ordered] if ENTROPIES in needs else None
    counts += sum(len(one.prompt) + len(one.completion) for one in ordered) if ENTROPIES in needs else 0
    batch = replace(
        batch,
        reasoning_ends=[one.case.reasoning_end if one.case else len(one.completion) for one in ordered],
        seed=(seed,),
        groups=torch.tensor([one.group for one in ordered]),
        rewards=torch.tensor(right),
        entropies=entropies,
    )
    result = method.estimator(InProcess(subject.model), batch)
    values = batch.to_callers_order(result.values)[: len(cases)]
    if method.by_token:
        values = [
            torch.stack([row[unit.start : unit.end].mean() for unit in case.units])
            for row, case in zip(values, cases, strict=True)
        ]
    return [row.detach().float() for row in values], counts + (result.work.tokens_fed if result.work else 0)


@dataclass(frozen=True)
class _Column:
    """Completion of a batch: a case, or a sampled sibling of the case of number `group`."""

    prompt: Tensor
    completion: Tensor
    group: int
    case: PlantedCase | None = None


def _units(case: PlantedCase | None, by_token: bool) -> list[Span]:
    if case is None:
        return []
    return [Span(t, t + 1) for t in range(case.reasoning_end)] if by_token else case.units


def _siblings(subject: Subject, cases: Sequence[PlantedCase], *, seed: int, room: int) -> list[_Column]:
    """Seven completions of each prompt, sampled at temperature 1."""
    owners = [(b, g) for b in range(len(cases)) for g in range(GROUP - 1)]
    prompts = [cases[b].prompt.tolist() for b, _ in owners]
    keys = [(seed, b, g) for b, g in owners]
    sampled = sample(subject.model, subject.tokenizer, prompts, max_completion_length=room, keys=keys).ids()
    return [_Column(cases[b].prompt, torch.tensor(ids), b) for (b, _), ids in zip(owners, sampled, strict=True)]


@torch.no_grad()
def _entropies(subject: Subject, one: _Column) -> Tensor:
    """Entropy of the distribution that each token was drawn from, (T,)."""
    ids = torch.cat([one.prompt, one.completion])
    rows = subject.model(input_ids=ids[None]).logits[0, len(one.prompt) - 1 : -1].float()
    return torch.distributions.Categorical(logits=rows).entropy()


def _answer_probability(subjects: Sequence[Subject], cases: Sequence[PlantedCase]) -> float:
    """Mean probability of the answers as they stand, given all that stands before them."""
    result: list[float] = []
    for start, subject in zip(range(0, len(cases), BATCH), itertools.cycle(subjects), strict=False):
        some = cases[start : start + BATCH]
        scores = score_counterfactuals(
            subject.model, TokenRows([case.prompt for case in some], [case.completion for case in some]),
            [[] for _ in some], [case.answer for case in some], mask=subject.tokenizer.pad_token_id,
        )  # fmt: skip
        result += scores.base.exp().tolist()
    return float(np.mean(result))


def _truths(values: Rows | None, problems: Sequence[PlantedProblem], settings: PlantedSettings) -> dict[str, Any]:
    """Agreement with the planted truths, over all problems and kind by kind."""

    def rows(truth: str, kinds: Sequence[str]) -> tuple[Rows | None, list[list[bool]]]:
        some = [i for i, problem in enumerate(problems) if problem.kind in kinds]
        labels = [[bool(getattr(unit, truth)) for unit in problems[i].units] for i in some]
        return None if values is None else [values[i] for i in some], labels

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
    subject: Subject, pieces: Pieces, cases: Sequence[PlantedCase], problems: Sequence[PlantedProblem],
    values: Mapping[str, Rows | None], settings: PlantedSettings,
) -> dict[str, Any]:  # fmt: skip
    """Sampled step advantages: as a truth for every method, and judged as a method themselves."""
    shares = pieces.get("step values", lambda: step_values(subject, cases, problems, settings))
    own = [np.diff(one["own"]).tolist() for one in shares]
    truths = {"own": own, "reward, absolute": [np.abs(np.diff(one["right"])).tolist() for one in shares]}
    correlations = {
        truth: {
            name: correlation(None if scores is None else scores[: len(rows)],
                              rows if scores is None else rows[: len(scores)], draws=settings.draws)
            for name, scores in values.items()
        }
        for truth, rows in truths.items()
    }  # fmt: skip
    return {
        "sampled_accuracy": float(np.mean([one["right"][0] for one in shares])),
        "step_values": correlations,
        "step_values_as_method": _truths(own, problems[: len(own)], settings),
    }


def step_values(
    subject: Subject, cases: Sequence[PlantedCase], problems: Sequence[PlantedProblem], settings: PlantedSettings
) -> list[dict[str, list[float]]]:
    """For each case, at each of its K + 1 boundaries, the shares of sampled continuations that reach an answer.

    Returns:
        For each case `own` and `right`, K + 1 shares each: of continuations that give the completion's own answer, and
        of those that are right.
    """
    places = [
        (b, k, i) for b, case in enumerate(cases) for k in range(len(case.boundaries)) for i in range(settings.samples)
    ]
    shares = [{"own": [0.0] * len(case.boundaries), "right": [0.0] * len(case.boundaries)} for case in cases]
    for start in range(0, len(places), _ROWS):
        some = places[start : start + _ROWS]
        prefixes = [torch.cat([cases[b].prompt, cases[b].completion[: cases[b].boundaries[k]]]).tolist()
                    for b, k, _ in some]  # fmt: skip
        keys = [(settings.seed * 1_000_003, *place) for place in some]
        texts = sample(subject.model, subject.tokenizer, prefixes, max_completion_length=settings.room, keys=keys).texts
        for (b, k, _), text in zip(some, texts, strict=True):
            number = final_number(text)
            shares[b]["own"][k] += (number == problems[b].answer) / settings.samples
            shares[b]["right"][k] += (number == problems[b].gold) / settings.samples
    return shares
