"""`python -m benchmarks cost`: measure the cost of each estimator of credit, and of what a user would run instead.

    python -m benchmarks cost          # cost on real completions; tables beside the other results
    python -m benchmarks cost draws    # how many draws of noise the gradient takes; a table of its own

Every estimator is first held to its definition (`definitions.py`); a wrong answer ends the run without a figure.
Seconds are those of one processor thread, contenders in turns in one process. Finished pieces are kept in a ledger, so
that an interrupted run resumes where it stopped.
"""

import argparse
import itertools
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from benchmarks.evidence import definitions
from benchmarks.evidence.gradient_draws import draws, draws_markdown
from benchmarks.harness.counting import attention_flops, counted, head_flops, tree_pairs
from benchmarks.harness.ledger import Ledger
from benchmarks.harness.provenance import describe_source, document_head, made_by
from benchmarks.harness.tables import RESULTS, table, write
from benchmarks.harness.workloads import Job, gsm8k_job, policy, random_model
from cfa_kernels import ScoredBatch, ScoringWork, Span, score_counterfactuals
from cfa_kernels.estimators.gradient import gradient_saliency
from cfa_kernels.estimators.partial_branches import answer_knockout, short_branches
from cfa_kernels.estimators.prefix_gain import prefix_gain
from cfa_kernels.estimators.probes import own_probe
from cfa_kernels.hf.model import causal_lm
from cfa_kernels.hf.verify import check_trainable
from cfa_kernels.scoring.access import InProcess

CPU = torch.device("cpu")
Record = dict[str, Any]
Shape = torch.Size


@dataclass(frozen=True)
class Settings:
    """Size of the measurement.

    Attributes:
        model: shape of the model, random weights.
        problems: problems of four completions each.
        stride: one in so many tokens is masked by a full forward; forwards of a completion are equally long, so the
            cost of all of them is scaled up from these.
        last: problems on which the outcome `last` is run too; its cost is that of `mean`.
        turns: rounds of the short runs. Masking every token takes one round, problem by problem.
    """

    model: str = "qwen3-40m"
    problems: int = 4
    stride: int = 24
    last: int = 1
    turns: int = 3


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """Run a function; return its result and its processor seconds."""
    start = time.process_time()
    result = run()
    return result, time.process_time() - start


# --- Masking, every span and every token --------------------------------------------------------------------------


def token_units(job: Job) -> list[list[Span]]:
    """Every token before the answer's marker, which is one token."""
    return [[Span(t, t + 1) for t in range(answer.start - 1)] for answer in job.answers]


def masking(model: PreTrainedModel, job: Job, units: list[list[Span]], outcomes: Sequence[str], stride: int) -> Record:
    """Exact masking of `units`, and one full forward for each.

    Returns:
        Seconds, tokens fed and operations of each outcome's packed trees (`packed`), of full forwards with the head on
        all rows (`full`) and on the rows that matter (`full_needed`), scaled to all units; and by outcome the largest
        gap in nats between the two, and the definition's own error.
    """
    scores, packed = {}, Record()
    for outcome in outcomes:
        with counted(model) as work:
            found, seconds = timed(
                lambda outcome=outcome: score_counterfactuals(
                    model, job.prompts, job.completions, units, job.answers, placeholder_id=job.placeholder_id,
                    outcome=outcome,
                )
            )  # fmt: skip
        scores[outcome] = found
        flops = work.flops + _unseen_flops(model, job, units, outcome, found.work)
        packed[outcome] = {"seconds": seconds, "flops": flops, **asdict(found.work)}
    exact = definitions.in_float64(model)
    forwards = {"full": _ZERO, "full_needed": _ZERO}
    checks = {outcome: _Check() for outcome in outcomes}
    for b, row in enumerate(units):
        some = range(min(stride // 2, len(row) - 1), len(row), stride)
        chosen = [row[k] for k in some]
        for name, every_row in (("full", True), ("full_needed", False)):
            done = definitions.full_forwards(model, job, b, chosen, wanted=len(row), every_row=every_row)
            scaled = {key: done.of_all(getattr(done, key)) for key in ("seconds", "tokens_fed", "flops")}
            more = {**scaled, "run": done.run, "wanted": done.wanted}
            forwards[name] = {key: value + more[key] for key, value in forwards[name].items()}
        first = definitions.full_forwards(exact, job, b, chosen[:1], wanted=len(row), every_row=False)
        for outcome, check in checks.items():
            truth, own = (definitions.masking_importances(forward, job, b, outcome) for forward in (done, first))
            nats = definitions.answer_nats(done, job, b, outcome)
            check.add(-scores[outcome].drop[b][list(some)], truth, float((truth[:1] - own).abs()), nats)
    return {
        "packed": packed,
        **forwards,
        "checked": {outcome: check.record(outcome) for outcome, check in checks.items()},
    }


_ZERO = {"seconds": 0.0, "tokens_fed": 0.0, "flops": 0.0, "run": 0, "wanted": 0}


@dataclass
class _Check:
    """Checks against a definition, completion by completion."""

    found: list[Tensor] = field(default_factory=list)
    truth: list[Tensor] = field(default_factory=list)
    own_error: float = 0.0
    scale: float = 0.0

    def add(self, found: Tensor, truth: Tensor, own_error: float, scale: float) -> None:
        self.found.append(found)
        self.truth.append(truth)
        self.own_error, self.scale = max(self.own_error, own_error), max(self.scale, scale)

    def record(self, name: str) -> Record:
        """The largest gap beside what it may be; raises `WrongAnswer`."""
        truth = torch.cat(self.truth)
        return {
            "largest_gap": definitions.held_to(name, torch.cat(self.found), truth, self.own_error, self.scale),
            "own_error": self.own_error,
            "largest_importance": float(truth.abs().max()),
            "median_importance": float(truth.abs().median()),
            "compared": len(truth),
        }


def _unseen_flops(model: PreTrainedModel, job: Job, units: list[list[Span]], outcome: str, work: ScoringWork) -> float:
    """Count operations outside modules: of packed attention, by visible pairs, and of the head, by its rows.

    A mean over the answer's rows is one row; a divergence also takes the logits of each completion and, through the
    head's transpose, their mean row.
    """
    answers = [Span(a.start, a.start + 1) if outcome == "last" else a for a in job.answers]
    rows = float(work.head_rows)
    if outcome in ("mean", "last"):
        rows = sum(1 + len(row) for row in units) + 2 * len(units)
    pairs = tree_pairs(replace(job, spans=units, answers=answers))
    return attention_flops(model.config, pairs) + head_flops(model.config, rows)


# --- Gradients ----------------------------------------------------------------------------------------------------


def plain_forward_and_backward(model: nn.Module, job: Job) -> None:
    """Sum of all completion log-probs and its gradient, one padded forward for the completions of each prompt."""
    for rows in _groups(job):
        prompt, completions = job.prompts[rows[0]], [job.completions[b] for b in rows]
        targets = nn.utils.rnn.pad_sequence(completions, batch_first=True)
        ids = torch.cat([prompt.expand(len(rows), -1), targets], dim=1)
        logits = causal_lm(model)(ids, use_cache=False, logits_to_keep=targets.shape[1] + 1).logits[:, :-1].float()
        logits.log_softmax(-1).gather(-1, targets[..., None]).sum().backward()


def _groups(job: Job) -> list[list[int]]:
    """Group neighbours of one prompt."""
    groups = itertools.groupby(range(len(job.prompts)), key=lambda b: job.prompts[b].tolist())
    return [list(rows) for _, rows in groups]


def gradients(model: nn.Module, job: Job, turns: int) -> Record:
    """OAR-G beside a plain forward and backward of the same completions; `model` is one to train."""
    check_trainable(causal_lm(model))
    units = token_units(job)

    def saliency(outcome: str, samples: int, sigma: float = 1e-3) -> Callable[[], tuple[list[Tensor], ScoringWork]]:
        def run() -> tuple[list[Tensor], ScoringWork]:
            batch = ScoredBatch.of(causal_lm(model), job.prompts, job.completions, units, job.answers)
            found = gradient_saliency(InProcess(model), batch, outcome=outcome, samples=samples, sigma=sigma)
            return batch.to_callers_order(found.values), found.work

        return run

    checked = _checked_gradients(model, job, units, saliency("mean_logprob", 1, 0.0)()[0])
    runs: dict[str, tuple[int, Callable[[], Any]]] = {
        "plain": (1, lambda: plain_forward_and_backward(model, job)),
        "mean, 1 draw": (1, saliency("mean", 1)),
        "mean, 2 draws": (2, saliency("mean", 2)),
        "mean_logprob, 1 draw": (1, saliency("mean_logprob", 1)),
    }
    found, results = _in_turns({name: run for name, (_, run) in runs.items()}, turns)
    for name, (draws_of, _) in runs.items():
        found[name] |= {"draws": draws_of}
        if name != "plain":
            found[name] |= asdict(results[name][1])
    found["plain"]["tokens_fed"] = sum(
        len(rows) * (len(job.prompts[rows[0]]) + max(len(job.completions[b]) for b in rows)) for rows in _groups(job)
    )
    return {"runs": found, "checked": {"gradient x input": checked}}


def _checked_gradients(model: nn.Module, job: Job, units: list[list[Span]], found: list[Tensor]) -> Record:
    """Hold the gradient without noise to its definition, on the first completion of each prompt."""
    causal = causal_lm(model)
    exact = definitions.in_float64(causal)
    check = _Check()
    for b, *_ in _groups(job):
        truth, slow = (definitions.gradient_importances(one, job, b, units[b]) for one in (exact, causal))
        check.add(found[b], truth, float((slow - truth).abs().max()), float(truth.max()))
    return check.record("gradient x input")


# --- What is cheaper than exact CF --------------------------------------------------------------------------------


def cheaper(model: PreTrainedModel, job: Job, turns: int) -> Record:
    """Prefix gain and the approximations beside exact CF, on the same spans."""
    marker = [answer.start - 1 for answer in job.answers]
    probes = [own_probe(c, a, m) for c, a, m in zip(job.completions, job.answers, marker, strict=True)]
    spans, access = (job.prompts, job.completions, job.spans, job.answers), InProcess(model)

    def batch() -> ScoredBatch:
        return ScoredBatch.of(model, *spans, placeholder_id=job.placeholder_id)

    def cf() -> Any:
        return score_counterfactuals(model, *spans, placeholder_id=job.placeholder_id)

    def gain() -> tuple[list[Tensor], ScoringWork]:
        asked = batch()
        found = prefix_gain(access, asked, [probes[b] for b in asked.numbers])
        return asked.to_callers_order(found.values), found.work

    def knockout() -> tuple[list[Tensor], ScoringWork]:
        asked = batch()
        return _importances(answer_knockout(access, asked, blind_from=[marker[b] for b in asked.numbers]), asked)

    def short(fed_from: list[int]) -> tuple[list[Tensor], ScoringWork]:
        asked = batch()
        return _importances(short_branches(access, asked, fed_from=[fed_from[b] for b in asked.numbers]), asked)

    runs: dict[str, Callable[[], tuple[list[Tensor], ScoringWork]]] = {
        "CF": lambda: _importances(cf()),
        "prefix_gain": gain,
        "knockout, from the marker": knockout,
        "short branches, from the marker": lambda: short(marker),
        "short branches, 8 tokens more": lambda: short([max(m - 8, 0) for m in marker]),
    }
    scores, gains = cf(), _Check()
    nats = -float(torch.cat([scores.base, *scores.masked]).min())
    doubled = definitions.in_float64(model)
    for b, found in enumerate(runs["prefix_gain"]()[0]):
        truth, slow = (definitions.prefix_gains(one, job, b).double() for one in (doubled, model))
        gains.add(found, truth, float((slow - truth).abs().max()), 1.0)
    whole = _Check()
    for found, truth in zip(short([0] * len(marker))[0], scores.drop, strict=True):
        whole.add(found, -truth.double(), 0.0, nats)
    checked = {
        "prefix_gain": gains.record("prefix_gain"),
        "short branches from the first token, beside CF": whole.record("short branches"),
    }
    found, results = _in_turns(runs, turns)
    # What is there without any credit: prompts once, completions up to the answer's last token, which is not fed.
    prompts = {tuple(p.tolist()) for p in job.prompts}
    trunk = sum(map(len, prompts)) + sum(answer.end - 1 for answer in job.answers)
    probed = sum(map(len, prompts)) + sum(row[-1].end for row in job.spans)
    for name, (_, work) in results.items():
        own = probed if name == "prefix_gain" else trunk
        found[name] |= {**asdict(work), "branch_rows": work.tokens_fed - own}
    return {"runs": found, "checked": checked}


def _importances(scores: Any, batch: ScoredBatch | None = None) -> tuple[list[Tensor], ScoringWork]:
    drop = scores.drop if batch is None else batch.to_callers_order(scores.drop)
    return [-row for row in drop], scores.work


# --- Counting and timing ------------------------------------------------------------------------------------------


def _in_turns(runs: dict[str, Callable[[], Any]], turns: int) -> tuple[dict[str, Record], dict[str, Any]]:
    """Operations of each run, seconds of `turns` rounds, each round starting one further along; and what each gave."""
    found, results = {}, {}
    for name, run in runs.items():
        with FlopCounterMode(display=False, custom_mapping=_FORMULAS) as counter:
            results[name] = run()
        found[name] = {"flops": counter.get_total_flops(), "each_seconds": list[float]()}
    names = list(runs)
    for turn in range(turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name]["each_seconds"].append(timed(runs[name])[1])
    for row in found.values():
        row["seconds"] = statistics.median(row["each_seconds"]) if turns else None
    return found, results


def _attention(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """Count the operations of two products over all pairs, seen or not, as the processor's kernel computes them."""
    return 2 * Shape(q[:-1]).numel() * k[-2] * (q[-1] + v[-1])


def _attention_backward(_: Shape, q: Shape, k: Shape, v: Shape, *__: Any, **___: Any) -> int:
    return 2 * Shape(q[:-1]).numel() * k[-2] * (3 * q[-1] + 2 * v[-1])


def _head(hidden: Shape, lm_head: Shape, *_: Any, **__: Any) -> int:
    return 2 * hidden[0] * Shape(lm_head).numel()


# What torch has no count for.
_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.cfa_kernels.linear_logprob: _head,
}


# --- The command --------------------------------------------------------------------------------------------------


def run(settings: Settings, ledger: Ledger, say: Callable[[str], None]) -> Record:
    """Measure everything, piece by piece."""
    job = gsm8k_job(settings.problems)
    model = random_model(settings.model, device=CPU, dtype=torch.float32)

    def piece(name: str, *what: str | int, work: Callable[[], Record]) -> Record:
        say(f"{name} {' '.join(map(str, what))}".strip())
        return ledger.get((name, *what, settings.model, settings.problems), work)

    problems = [job.part(range(4 * i, 4 * i + 4)) for i in range(settings.problems)]
    tokens = [
        piece("tokens", i, settings.stride, *outcomes, work=lambda part=part, outcomes=outcomes: masking(
            model, part, token_units(part), outcomes, settings.stride
        ))
        for i, part in enumerate(problems)
        for outcomes in [("mean", "last") if i < settings.last else ("mean",)]
    ]  # fmt: skip
    spans = [
        piece("spans", i, work=lambda part=part: masking(model, part, part.spans, ("logprob",), 1))
        for i, part in enumerate(problems)
    ]
    trained = {
        name: piece("gradients", name, settings.turns, work=lambda lora=lora: gradients(
            policy(settings.model, lora=lora, device=CPU, dtype=torch.float32), job, settings.turns
        ))
        for name, lora in (("LoRA", True), ("full", False))
    }  # fmt: skip
    return {
        "settings": asdict(settings),
        "job": job.describe(),
        "tokens": tokens,
        "spans": spans,
        "gradients": trained,
        "cheaper": piece("cheaper", settings.turns, work=lambda: cheaper(model, job, settings.turns)),
    }


def _total(pieces: Sequence[Record], *path: str) -> Record:
    """Sums of a run's figures over the problems that have it."""
    rows = list[Record]()
    for piece in pieces:
        for key in path:
            piece = piece.get(key, {})
        rows += [piece] if piece else []
    return {key: sum(row[key] for row in rows) for key in rows[0]}


def compared(document: Record) -> list[Record]:
    """One row per run: what it took, that of what it is compared with, their ratio, and the target if there is one.

    Ratios of what is cheaper are ours over theirs; of `times` theirs over ours.
    """
    rows = list[Record]()

    def add(name: str, mine: Record, other: str, theirs: Record, draws_of: int = 1, **targets: float) -> None:
        rows.append({"name": name, "beside": other, "draws": draws_of, "targets": targets}
                    | {f"{key}{suffix}": found.get(key) for suffix, found in (("", mine), (" beside", theirs))
                       for key in ("tokens_fed", "branch_rows", "flops", "seconds")})  # fmt: skip

    tokens, spans = document["tokens"], document["spans"]
    for outcome in ("mean", "last"):
        some = [piece for piece in tokens if outcome in piece["packed"]]
        if not some:
            continue
        name = f"OAR-P, `{outcome}`" + ("" if len(some) == len(tokens) else f" ({4 * len(some)} completions)")
        mine = _total(some, "packed", outcome)
        add(name, mine, "a full forward per token", _total(some, "full"), speed=5.0, tokens=0.35)
        add(name, mine, "the same, head on the answer's rows alone", _total(some, "full_needed"))
    mine = _total(spans, "packed", "logprob")
    add("CF", mine, "a full forward per span", _total(spans, "full"))
    add("CF", mine, "the same, head on the answer's rows alone", _total(spans, "full_needed"))
    for name, piece in document["gradients"].items():
        plain = piece["runs"]["plain"]
        for kind, found in piece["runs"].items():
            if kind != "plain":
                add(f"OAR-G, {kind}", found, f"plain forward and backward, {name}", plain, found["draws"], per_draw=1.5)
    runs = document["cheaper"]["runs"]
    for name, found in runs.items():
        if name != "CF":
            add(name, found, "exact CF", runs["CF"], **({"branch_rows": 0.25} if name == "prefix_gain" else {}))
    return rows


def reached(row: Record) -> list[str]:
    """For each target of a row what was measured, what was wanted, and whether it was reached."""
    said = []
    for kind, wanted in row["targets"].items():
        key = {"speed": "seconds", "tokens": "tokens_fed", "per_draw": "seconds"}.get(kind, kind)
        if row[key] is None or row[f"{key} beside"] is None:
            continue
        share = row[key] / row[f"{key} beside"]
        if kind == "speed":
            value, met, text = 1 / share, 1 / share >= wanted, f"{1 / share:.2f} times faster, at least {wanted:g}"
        else:
            value = share / row["draws"] if kind == "per_draw" else share
            label = {"tokens": "of the tokens", "per_draw": "a draw, CPU", "branch_rows": "of the branch rows"}[kind]
            met, text = value <= wanted, f"{value:.2f} {label}, at most {wanted:g}"
        said.append(f"{text}: {'reached' if met else 'missed'}")
    return said


def markdown(document: Record) -> str:
    """The tables."""
    settings, job, machine = document["settings"], document["job"], document["environment"]["device"]
    load, turns = document["load"], settings["turns"]
    rounds = "in one round" if turns == 1 else f"by the median of {turns} rounds"
    lines = [
        "# What credit costs\n",
        f"{made_by(document)}, on one thread of "
        f"{machine['name']} ({machine['cores']} cores, shared: load {load:.1f} when this was written). "
        f"Model {settings['model']} with random weights in float32; {job['completions']} completions ({job['source']}) "
        f"of {job['completion_tokens_mean']:.0f} tokens, prompts of {job['prompt_tokens_mean']:.0f}, "
        f"{job['spans_mean']:.1f} spans each.\n",
        "Seconds are the processor's, of one thread. What is compared was run in turns in one process, the several "
        "comparisons perhaps in several: every token and every span in one round, problem by problem; the rest "
        f"{rounds}. "
        f"Full forwards per token were run for one token in {settings['stride']} of every completion "
        f"({_runs(document)}) and scaled to all of them: forwards of a completion are equally long. Neither they nor "
        "those per span are fed past the last row that predicts the "
        "answer. Operations are multiply-adds, twice: of linear layers, head and visible pairs of attention for "
        "masking, as executed (a processor's attention kernel computes hidden pairs too) in the other tables. Ratios "
        "are ours over theirs.\n",
    ]
    head = ["run", "beside", "tokens fed", "of theirs", "TFLOP", "of theirs", "CPU s", "of theirs", "target"]
    cells = [
        [row["name"], row["beside"], *(cell for key, digits, unit in
          (("tokens_fed", 0, 1), ("flops", 2, 1e12), ("seconds", 1, 1)) for cell in _cells(row, key, digits, unit)),
         "; ".join(reached(row))]
        for row in document["rows"]
    ]  # fmt: skip
    lines.append(table(head, cells))
    lines.append("Branch rows are tokens fed beyond the completions as sampled, which a training step feeds anyhow:\n")
    runs = document["cheaper"]["runs"]
    branches = runs["CF"]["branch_rows"]
    shares = [[name, f"{r['branch_rows']:,}", f"{r['branch_rows'] / branches:.2f}"] for name, r in runs.items()]
    lines.append(table(["run", "branch rows", "of exact CF's"], shares))
    lines.append(
        "Results were held to their definitions first. The definition's own error is that of its float32 run against "
        "float64, where one was made. Knock-outs and OAR-G with noise are held to theirs by the tests.\n"
    )
    keys = ("largest_gap", "own_error", "median_importance", "largest_importance")
    head = [
        "run",
        "numbers compared",
        "largest gap",
        "definition's own error",
        "median number, at most",
        "largest number",
    ]
    checks = [[n, f"{found['compared']:,}", *(f"{found[key]:.1e}" for key in keys)] for n, found in _checks(document)]
    lines.append(table(head, checks))
    return "\n".join(lines)


def _runs(document: Record) -> str:
    run, wanted = (sum(piece["full"][key] for piece in document["tokens"]) for key in ("run", "wanted"))
    return f"{run:,} of {wanted:,} forwards"


def _cells(row: Record, key: str, digits: int, unit: float) -> list[str]:
    mine, theirs = row[key], row[f"{key} beside"]
    if mine is None:
        return ["–", "–"]
    return [f"{mine / unit:,.{digits}f}", f"{mine / theirs:.2f}" if theirs else "–"]


def _checks(document: Record) -> list[tuple[str, Record]]:
    checks = list[tuple[str, Record]]()
    for kind, label in (("tokens", "OAR-P"), ("spans", "CF")):
        by_outcome: dict[str, list[Record]] = {}
        for piece in document[kind]:
            for outcome, found in piece["checked"].items():
                by_outcome.setdefault(outcome, []).append(found)
        for outcome, found in by_outcome.items():
            worst = {key: max(one[key] for one in found) for key in found[0]}
            checks.append((f"{label}, `{outcome}`", worst | {"compared": sum(one["compared"] for one in found)}))
    for name, piece in document["gradients"].items():
        checks += [(f"{check}, {name}", found) for check, found in piece["checked"].items()]
    return checks + list(document["cheaper"]["checked"].items())


def main(argv: list[str] | None = None) -> int:
    """Print the tables and write them; a wrong answer is one line on stderr and exit code 1."""
    given = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(given)
    torch.set_num_threads(1)
    made = describe_source(shlex.join(["python", "-m", "benchmarks", "cost", *given]), options.commit)
    if options.what == "draws":
        document: Record = document_head(made) | draws(options.completions, options.sigma)
        return _told(write(document, draws_markdown(document), options.results, "evidence-draws"))
    settings = Settings(**{one.name: getattr(options, one.name) for one in fields(Settings)})
    ledger = Ledger(options.folder / "ledger.jsonl", made, mixed=options.mixed)
    try:
        found = run(settings, ledger, lambda line: print(line, flush=True))
    except AssertionError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 1
    document = document_head(made, ledger.used) | found | {"load": os.getloadavg()[0]}
    document["rows"] = compared(document)
    return _told(write(document, markdown(document), options.results, "evidence-cost"))


def _told(paths: Sequence[Path]) -> int:
    for path in paths:
        print(f"== {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks cost", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("cost", "draws"), default="cost")
    parser.add_argument("--folder", type=Path, default=Path("runs/cost"), help="of the ledger; default: %(default)s")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the tables")
    parser.add_argument("--commit", help="what to record where git cannot tell")
    parser.add_argument("--mixed", action="store_true", help="use what other code or machines left in the ledger")
    for one in fields(Settings):
        kind = type(one.default)
        parser.add_argument(f"--{one.name}", type=kind, default=one.default, help="default: %(default)s")
    parser.add_argument("--completions", type=int, default=64, help="completions of the embedded model, for draws")
    parser.add_argument("--sigma", type=float, default=1e-3, help="standard deviation of the noise, for draws")
    return parser
