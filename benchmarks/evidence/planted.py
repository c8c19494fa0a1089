"""Measure which estimators find what was planted in generated solutions, and what matters for learning."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Categorical

from benchmarks.evidence.agreement import AUROC, LINES, SPEARMAN, TOKENS, Rows, agreement
from benchmarks.evidence.models import TRAINED, Subject
from benchmarks.evidence.problems import KINDS, Case, PlantedProblem, generate
from benchmarks.harness.results import Pieces, interval, made_by, table
from cfa_kernels import Importances, ScoredBatch, Span
from cfa_kernels.estimators import Entropy, Gradient, Masking, PrefixGain
from cfa_kernels.estimators.base import Estimator, OwnFunction
from cfa_kernels.options import Count, check_fields
from cfa_kernels.rows import Rows as TokenRows
from cfa_kernels.scoring.access import InProcess
from trainer.data import encode_prompt
from trainer.rewards.numbers import final_number
from trainer.rollouts import generate as sample

CHANCE, SAMPLED = "random", "sampled step advantage"  # rows beside the methods; the latter is a truth as well
BATCH, _DECODED = 20, 256  # problems that are judged, and completions that are decoded, together


def position(model: Any, batch: ScoredBatch) -> Importances:
    """Judge units by their place."""
    return Importances([torch.arange(len(units)).float() for units in batch.units])


def length(model: Any, batch: ScoredBatch) -> Importances:
    """Judge units by their number of tokens."""
    return Importances([torch.tensor([float(unit.end - unit.start) for unit in units]) for units in batch.units])


METHODS: dict[str, Estimator] = {
    "position": OwnFunction(position), "length": OwnFunction(length), "CF": Masking(),
    "CF, total effect": Masking(effect="total"),
    "CF, half by prefix gain": Masking(preselect=0.5, preselect_by="prefix_gain"),
    "CF, KL of mean": Masking(outcome="mean"), "CF, KL of last": Masking(outcome="last"),
    "OAR-P, mean": Masking(outcome="mean"), "OAR-P, last": Masking(outcome="last"), "OAR-P, log-prob": Masking(),
    "OAR-G, mean": Gradient("mean"), "OAR-G, last": Gradient("last"),
    "gradient x input": Gradient("mean_logprob", 0.0), "prefix gain": PrefixGain(), "entropy": Entropy(),
}  # fmt: skip
"""By name; `OAR-P` judges each token, and a line's importance is the mean over its tokens."""


@dataclass(frozen=True)
class PlantedSettings:
    """Size of the measurement."""

    problems: Count = 200
    """Problems that every method judges, the kinds in turn."""
    costly: Count = 60
    """Of them, those that methods by token judge and that get sampled step values."""
    samples: Count = 12
    """Continuations from each end of a line of those."""
    chains: Count = 200
    """Right and greedy ones, each token of which is replaced."""
    room: Count = 256
    """Tokens of a completion."""
    draws: Count = 1000
    """Draws of the bootstrap."""
    seed: int = 0
    """Seed of problems and draws."""

    def __post_init__(self) -> None:
        check_fields(self)


def run(
    models: Mapping[str, Sequence[Subject]], pieces: Pieces, settings: PlantedSettings,
    methods: Sequence[str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Judge planted problems by every method, or some, and sum up: the document that `markdown` writes."""
    problems = list(itertools.islice(generate("test", settings.seed), settings.problems))
    document: dict[str, Any] = {"settings": asdict(settings), "models": {}}
    for model, subjects in models.items():
        first, tokenizer = subjects[0], subjects[0].tokenizer
        texts = [tokenizer(problem.solution, add_special_tokens=False)["input_ids"] for problem in problems]
        cases = [Case.of(problem.question, ids, tokenizer) for problem, ids in zip(problems, texts, strict=True)]
        few, chains = cases[: settings.costly], list[dict[str, Any]]()
        values, tokens = dict[str, Rows | None]({CHANCE: None}), dict[str, Rows | None]({CHANCE: None})
        if model == TRAINED:
            print(f"{model} model: {SAMPLED}, critical tokens")
            values[SAMPLED] = pieces.get(SAMPLED, functools.partial(step_advantages, first, few, problems, settings))
            chains = pieces.get("chains", functools.partial(right_chains, first, settings))
        whole = [Case.of(chain["question"], chain["completion"], tokenizer) for chain in chains]
        critical = [chain["critical"] for chain in chains]
        for name in methods or METHODS:
            print(f"{model} model: {name}")
            some, work = few if name.startswith("OAR-P") else cases, functools.partial(ask, name, subjects)
            values[name] = pieces.get(f"{model}, {name}", functools.partial(work, some))
            if chains:
                tokens[name] = pieces.get(f"{name}, by token", functools.partial(work, whole, tokens=True))
        found, own = dict[str, Any](), values.get(SAMPLED) or ()
        for name, rows in values.items():
            found[name] = _truths(rows, problems, settings)
            found[name][SAMPLED] = agreement(rows and rows[: len(own)], own, SPEARMAN, draws=settings.draws)
            if name in tokens:
                found[name]["tokens"] = agreement(tokens[name], critical, TOKENS, draws=settings.draws)
        document["models"][model] = {
            "fingerprints": [one.fingerprint for one in subjects], "accuracy": first.accuracy, "methods": found,
            "chains": len(chains), "tokens": sum(map(len, critical)), "critical": sum(map(sum, critical)),
        }  # fmt: skip
    return document


def ask(name: str, subjects: Sequence[Subject], cases: Sequence[Case], *, tokens: bool = False) -> list[list[float]]:
    """Importances of the lines of each case by a method, high where they matter; models take turns batch by batch.

    With `tokens`, of the reasoning's tokens: each by itself where the method judges tokens, else its line's.
    """
    values, estimator = list[list[float]](), METHODS[name]
    single = name.startswith("OAR-P") or (tokens and isinstance(estimator, Gradient | Entropy))
    for start, subject in zip(range(0, len(cases), BATCH), itertools.cycle(subjects), strict=False):
        some = cases[start : start + BATCH]
        batch = ScoredBatch.of(
            subject.model, TokenRows([case.prompt for case in some], [case.completion for case in some]),
            [[Span(t, t + 1) for t in range(case.reasoning_end)] if single else case.units for case in some],
            [case.answer for case in some], mask=subject.tokenizer.pad_token_id,
        )  # fmt: skip
        batch = replace(batch, reasoning_ends=[some[i].reasoning_end for i in batch.index], seed=(start,))
        if isinstance(estimator, Entropy):
            drawn = [Categorical(logits=logits(subject, some[i])) for i in batch.index]
            batch = replace(batch, entropies=[one.entropy() for one in drawn])
        rows = batch.to_callers_order(estimator(InProcess(subject.model), batch).values)
        for case, row in zip(some, rows, strict=True):
            if single and not tokens:
                row = torch.stack([row[unit.start : unit.end].mean() for unit in case.units])
            elif tokens and not single:
                row = row.repeat_interleave(torch.tensor([unit.end - unit.start for unit in case.units]))
            values.append(row.tolist())
    return values


@torch.no_grad()
def logits(subject: Subject, case: Case) -> Tensor:
    """Logits that each token of a completion was drawn from, (T, V)."""
    ids = torch.cat([case.prompt, case.completion])
    return subject.model(input_ids=ids[None]).logits[0, len(case.prompt) - 1 : -1].float()


def _truths(values: Rows | None, problems: Sequence[PlantedProblem], settings: PlantedSettings) -> dict[str, Any]:
    """Agreement with the planted truths, over all problems and by kind."""
    result = {}
    for truth, kind in itertools.product(("direct", "total", "origin"), (None, *KINDS)):
        some = [i for i, one in enumerate(problems[: values and len(values)]) if kind in (None, one.kind)]
        labels = [[float(getattr(unit, truth)) for unit in problems[i].units] for i in some]
        result[f"{truth}, {kind}" if kind else truth] = agreement(
            values and [values[i] for i in some], labels, AUROC if kind else LINES, draws=settings.draws
        )
    return result


def continued(
    subject: Subject, begun: Sequence[tuple[Tensor, Tensor]], room: int, keys: Sequence[Sequence[int]] | None = None
) -> list[tuple[list[int], Any]]:
    """The completions that prompts and beginnings are decoded on to, greedily or sampled by keys, and their answers."""
    result: list[Any] = [None] * len(begun)
    order = sorted(range(len(begun)), key=lambda i: sum(map(len, begun[i])))  # likewise long ones end together
    for start in range(0, len(order), _DECODED):
        some = order[start : start + _DECODED]
        prompts, drawn = [torch.cat(begun[i]).tolist() for i in some], keys and [keys[i] for i in some]
        left = max(room - len(begun[some[0]][1]), 1)
        rollouts = sample(subject.model, subject.tokenizer, prompts, max_completion_length=left, keys=drawn).ids()
        for i, ids in zip(some, rollouts, strict=True):
            ids = [*begun[i][1].tolist(), *ids]
            result[i] = ids, final_number(subject.tokenizer.decode(ids, skip_special_tokens=True))
    return result


def step_advantages(
    subject: Subject, cases: Sequence[Case], problems: Sequence[PlantedProblem], settings: PlantedSettings
) -> list[list[float]]:
    """What each line adds to the share of sampled continuations that give the completion's own answer, right or not."""
    result = []
    for b, case in enumerate(cases):
        ends = [0, *(unit.end for unit in case.units)]
        keys = [(settings.seed, b, end, i) for end in ends for i in range(settings.samples)]
        begun = [(case.prompt, case.completion[:end]) for _, _, end, _ in keys]
        reached = [number == problems[b].answer for _, number in continued(subject, begun, settings.room, keys)]
        result.append(np.diff(np.reshape(reached, (len(ends), -1)).mean(1)).tolist())
    return result


def right_chains(subject: Subject, settings: PlantedSettings) -> list[dict[str, Any]]:
    """Greedy completions that are right, and which tokens of their reasoning are critical.

    A token is critical if the most probable other one in its place, decoded on, gives a wrong answer (the oracle of
    "Outcome-Grounded Advantage Reshaping"). Of each chain: `question`, `gold`, `completion` and `critical`.
    """
    problems = list(itertools.islice(generate("test", settings.seed + 1), 8 * settings.chains))
    prompts = [torch.tensor(encode_prompt(problem.question, subject.tokenizer)) for problem in problems]
    greedy = continued(subject, [(prompt, prompt[:0]) for prompt in prompts], settings.room)
    chains: list[dict[str, Any]] = [
        {"question": problem.question, "gold": problem.gold, "completion": ids[:-1]}
        for problem, (ids, number) in zip(problems, greedy, strict=True) if number == problem.gold
    ][: settings.chains]  # fmt: skip
    begun, owners = list[tuple[Tensor, Tensor]](), list[int]()
    for c, chain in enumerate(chains):
        case = Case.of(chain["question"], chain["completion"], subject.tokenizer)
        rows = logits(subject, case).scatter(1, case.completion[:, None], -torch.inf)
        rows[:, subject.tokenizer.eos_token_id] = -torch.inf  # which leaves nothing to decode
        others = rows.argmax(-1)[: case.reasoning_end]
        begun += [(case.prompt, torch.cat([case.completion[:t], token[None]])) for t, token in enumerate(others)]
        owners += [c] * len(others)
        chain["critical"] = []
    for c, (_, number) in zip(owners, continued(subject, begun, settings.room), strict=True):
        chains[c]["critical"].append(number != chains[c]["gold"])
    return chains


def markdown(document: dict[str, Any]) -> str:
    """The tables of `planted`."""
    settings, truths = document["settings"], ("direct", "total", "origin")
    columns = [
        [*((truth, "auroc") for truth in truths), (SAMPLED, "spearman"), (SAMPLED, "p")],
        [(truth, figure) for truth in truths[:2] for figure in ("spearman", "p", "recall", "first")],
        [(f"{truth}, {kind}", "auroc") for kind in KINDS for truth in truths[:2]],
        [("tokens", figure) for figure in TOKENS],
    ]
    parts = [
        f"# Planted truth\n\n{made_by(document)}. {settings['problems']} "
        "problems with known idle lines, headers, repeats, wrong steps and unwritten last computations. *Direct*: "
        "the answer's line reads this line; *total*: the answer rests on it; *origin*: its operand was replaced. "
        "AUROC is within a problem and free of position: any rule by position only gets 0.5. Lines are equally long,"
        " so that length ties them. *random*: the mean of many draws of numbers that know nothing, and where 95 % of"
        " the draws fall; else 95 % bootstrap intervals over problems. *First*: the share of problems whose most "
        "important line is true. *p*: that the mean Spearman is 0, by a t-test over problems. *Sampled step "
        "advantage*: what a line adds to the probability of the completion's own answer. *Tokens* of right greedy "
        "chains: critical are those in whose place the most probable other token, decoded on, gives a wrong answer "
        "(the oracle of OAR); recall among as many top tokens as are critical, then among the top 10 % to 90 %. What"
        " judges lines gives each token its line's number; of equal numbers each comes first equally often.\n"
    ]
    for name, results in document["models"].items():
        said, tokens = f"{len(results['fingerprints'])} of them", results["tokens"]
        if tokens:
            said = f"solves {results['accuracy']:.1%} held out; {results['chains']} right chains of {tokens:,} tokens"
            said += f", of which {results['critical'] / tokens:.1%} are critical"
        parts.append(f"## The {name} model ({said})\n")
        for part in columns if tokens else columns[:3]:
            cells = {key: [one.get(t, {}).get(f) for t, f in part] for key, one in results["methods"].items()}
            rows = [[key, *(f"{x:.1g}" if isinstance(x, float) else interval(x) for x in row)]
                    for key, row in cells.items()]  # fmt: skip
            parts.append(table(["method", *map(", ".join, part)], rows))
    return "\n".join(parts)
