"""Measure which estimators find what was planted in generated solutions, and what matters for learning."""

import functools
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from benchmarks.harness.results import Pieces, interval, made_by, table
from benchmarks.research.agreement import AUROC, LINES, SPEARMAN, TOKENS, Rows, agreement
from benchmarks.research.models import Problem, Subject
from benchmarks.research.problems import KINDS, PlantedProblem, generate, training_rows
from benchmarks.research.regimes import make
from cfa_kernels import Importances, ScoredBatch, Span, SpanRules, TrainingForward, token_entropies
from cfa_kernels.estimators import Entropy, Gradient, Masking, PrefixGain
from cfa_kernels.estimators.base import Estimator, OwnFunction
from cfa_kernels.options import Count, check_fields
from cfa_kernels.rows import Rows as TokenRows
from cfa_kernels.scoring.access import InProcess
from cfa_kernels.scoring.packed import PackedForward
from cfa_kernels.text.find import Reasoning, find_reasoning
from trainer.data import encode_prompt

TRAINED, RANDOM = "trained", "random"
COPIES = {TRAINED: 1, RANDOM: 10}
"""Models; a preference of random weights is the same for all problems, and several such models even it out."""
RECIPE = {"vocab_size": 512, "max_steps": 5000, "batch_size": 16, "max_position_embeddings": 512}
"""Settings of the trained model; the rest is the embedded one's."""
CHANCE, SAMPLED = "random", "sampled step advantage"  # rows beside the methods; the latter is a truth as well
BATCH = 20  # problems that are judged together
EVERY_LINE = SpanRules(lambda text: [line.span() for line in re.finditer(".*\n", text)], max_spans=64)


def position(model: Any, batch: ScoredBatch) -> Importances:
    """Judge units by their place."""
    return Importances([torch.arange(len(units)).float() for units in batch.units])


def length(model: Any, batch: ScoredBatch) -> Importances:
    """Judge units by their number of tokens."""
    return Importances([torch.tensor([float(unit.end - unit.start) for unit in units]) for units in batch.units])


METHODS: dict[str, Estimator] = {
    "position": OwnFunction(position), "length": OwnFunction(length), "CF": Masking(),
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

    model: str = ""
    """Model folder, in place of one trained here."""
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


def train(folder: Path) -> Path:
    """The trained model's folder below `folder`, made if it is not there: some thirty minutes of one core."""
    count = RECIPE["max_steps"] * RECIPE["batch_size"]
    return make(folder, training_rows("train", 0, count), training_rows("test", 0, 400, short=0), RECIPE)


def load(folder: Path, name: str, seed: int, room: int) -> Subject:
    """The trained model of a folder, or one of its shape with random weights."""
    subject = Subject(str(folder), max_tokens=room)
    if name == RANDOM:
        torch.manual_seed(seed)
        subject.model = Qwen3ForCausalLM(subject.model.config).eval()
    return subject


def run(pieces: Pieces, folder: Path, settings: PlantedSettings) -> dict[str, Any]:
    """Judge planted problems by every method and sum up: the document that `markdown` writes."""
    problems = list(itertools.islice(generate("test", settings.seed), settings.problems))
    place = Path(settings.model) if settings.model else train(folder)
    accuracy = json.loads((place / "warmup.json").read_text(encoding="utf-8"))["held_out_accuracy"]
    document: dict[str, Any] = {"settings": asdict(settings), "models": {}}
    for model, copies in COPIES.items():
        subjects = [load(place, model, seed, settings.room) for seed in range(copies)]
        first, tokenizer = subjects[0], subjects[0].tokenizer
        asked = [(one.question, tokenizer(f"{one.solution}{tokenizer.eos_token}")["input_ids"]) for one in problems]
        cases, chains = rows_of(asked, tokenizer), list[dict[str, Any]]()
        few = cases.take(range(min(settings.costly, len(cases))))
        values, tokens = dict[str, Rows | None]({CHANCE: None}), dict[str, Rows | None]({CHANCE: None})
        if model == TRAINED:
            print(f"{model} model: {SAMPLED}, critical tokens")
            values[SAMPLED] = pieces.get(SAMPLED, functools.partial(step_advantages, first, few, problems, settings))
            chains = pieces.get("chains", functools.partial(right_chains, first, settings))
        whole = rows_of([(chain["question"], chain["completion"]) for chain in chains], tokenizer)
        critical = [chain["critical"] for chain in chains]
        for name in METHODS:
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
            "accuracy": accuracy, "methods": found, "chains": len(chains), "tokens": sum(map(len, critical)),
            "critical": sum(map(sum, critical)),
        }  # fmt: skip
    return document


def rows_of(asked: Sequence[tuple[str, Sequence[int]]], tokenizer: Any) -> TokenRows:
    """Rows of questions and completions."""
    prompts = [torch.tensor(encode_prompt(question, tokenizer)) for question, _ in asked]
    return TokenRows(prompts, [torch.tensor(ids) for _, ids in asked])


def lines_of(rows: TokenRows, tokenizer: Any) -> list[Reasoning]:
    """The lines before the answer's of each completion, one behind the other, and its answer."""
    return [*find_reasoning(dict(enumerate(rows.completions)), tokenizer, spans=EVERY_LINE).values()]


def ask(name: str, subjects: Sequence[Subject], rows: TokenRows, *, tokens: bool = False) -> list[list[float]]:
    """Importances of the lines of each row by a method, high where they matter; models take turns batch by batch.

    With `tokens`, of the reasoning's tokens: each by itself where the method judges tokens, else its line's.
    """
    values, estimator = list[list[float]](), METHODS[name]
    single = name.startswith("OAR-P") or (tokens and isinstance(estimator, Gradient | Entropy))
    for start, subject in zip(range(0, len(rows), BATCH), itertools.cycle(subjects), strict=False):
        part = slice(start, start + BATCH)
        some = TokenRows(rows.prompts[part], rows.completions[part])
        cases = lines_of(some, subject.tokenizer)
        found, _ = judge(estimator, subject, some, cases, single=single, means=not tokens, seed=start)
        for one, row in zip(cases, found, strict=True):
            if tokens and not single:
                row = row.repeat_interleave(torch.tensor([unit.end - unit.start for unit in one.spans]))
            values.append(row.tolist())
    return values


def judge(
    estimator: Estimator, subject: Subject, rows: TokenRows, cases: Sequence[Reasoning], *, single: bool = False,
    means: bool = True, seed: int = 0, forward: PackedForward | None = None,
) -> tuple[list[torch.Tensor], int]:  # fmt: skip
    """Importances of the spans of each row, and how many tokens were fed for them, beyond those of a `forward`.

    If `single`, each token of the reasoning is judged by itself; a span has the mean over its own, with `means`.
    """
    units = [[Span(t, t + 1) for t in range(one.end)] if single else one.spans for one in cases]
    batch = ScoredBatch.of(
        subject.model, rows, units, [one.answer for one in cases], mask=subject.tokenizer.pad_token_id
    )
    batch = replace(batch, reasoning_ends=[cases[i].end for i in batch.index], seed=(seed,))
    if isinstance(estimator, Entropy):
        entropies = forward.logprobs(return_entropy=True)[1] if forward else token_entropies(subject.model, rows)
        batch = replace(batch, entropies=[entropies[i] for i in batch.index])
    result = estimator(TrainingForward(forward) if forward else InProcess(subject.model), batch)
    found = batch.to_callers_order(result.values)
    if single and means:
        found = [torch.stack([row[unit.start : unit.end].mean() for unit in one.spans])
                 for one, row in zip(cases, found, strict=True)]  # fmt: skip
    return found, result.work.tokens_fed if result.work else 0


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


def step_advantages(
    subject: Subject, rows: TokenRows, problems: Sequence[PlantedProblem], settings: PlantedSettings
) -> list[list[float]]:
    """What each line adds to the share of sampled continuations that give the completion's own answer, right or not."""
    torch.manual_seed(settings.seed)
    result = []
    for b, one in enumerate(lines_of(rows, subject.tokenizer)):
        begun = [rows.completions[b][:end] for end in (0, *(unit.end for unit in one.spans))]
        asked = Problem(rows.prompts[b].tolist(), str(problems[b].answer))
        result.append(subject.values([asked] * len(begun), begun, settings.samples).diff().tolist())
    return result


@torch.no_grad()
def right_chains(subject: Subject, settings: PlantedSettings) -> list[dict[str, Any]]:
    """Greedy completions that are right, and which tokens of their reasoning are critical.

    A token is critical if the most probable other one in its place, decoded on, gives a wrong answer (the oracle of
    "Outcome-Grounded Advantage Reshaping"). Of each chain: `question`, `completion` and `critical`.
    """
    problems = list(itertools.islice(generate("test", settings.seed + 1), 8 * settings.chains))
    asked = [Problem(encode_prompt(one.question, subject.tokenizer), str(one.gold)) for one in problems]
    greedy, rewards = subject.answered(asked, greedy=True)
    chains, right = list[dict[str, Any]](), [i for i, reward in enumerate(rewards) if reward][: settings.chains]
    rows = rows_of([(problems[i].question, greedy[i].tolist()) for i in right], subject.tokenizer)
    columns = right, rows.prompts, rows.completions, lines_of(rows, subject.tokenizer)
    for i, prompt, completion, one in zip(*columns, strict=True):
        logits = subject.model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        logits = logits.scatter(1, completion[:, None], -torch.inf)
        logits[:, subject.tokenizer.eos_token_id] = -torch.inf  # which leaves nothing to decode
        begun = [torch.cat([completion[:t], other[None]]) for t, other in enumerate(logits.argmax(-1)[: one.end])]
        _, rewards = subject.answered([asked[i]] * len(begun), begun, greedy=True)
        critical = [not reward for reward in rewards]
        chains.append({"question": problems[i].question, "completion": completion.tolist(), "critical": critical})
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
        said, tokens = f"{COPIES[name]} of them", results["tokens"]
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
