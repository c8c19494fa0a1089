"""Run each estimator of credit, and what a user would run instead, with seconds, tokens fed and operations.

Every estimator is first held to its definition (`definitions.py`); a wrong answer is a `WrongAnswer`.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from benchmarks.evidence import definitions
from benchmarks.harness.counting import attention_flops, counted, head_flops, tree_pairs
from benchmarks.harness.workloads import Job
from cfa_kernels import ScoredBatch, ScoringWork, Span, score_counterfactuals
from cfa_kernels.estimators.gradient import Gradient
from cfa_kernels.estimators.prefix_gain import prefix_gain
from cfa_kernels.hf.model import causal_lm
from cfa_kernels.hf.verify import check_trainable
from cfa_kernels.scoring.access import InProcess

CPU = torch.device("cpu")
Record = dict[str, Any]
Shape = torch.Size


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
            found = Gradient(outcome, sigma, samples)(InProcess(model), batch)
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
    """Prefix gain beside exact CF, on the same spans."""
    marker = [answer.start - 1 for answer in job.answers]
    spans, access = (job.prompts, job.completions, job.spans, job.answers), InProcess(model)

    def batch() -> ScoredBatch:
        return ScoredBatch.of(model, *spans, placeholder_id=job.placeholder_id)

    def cf() -> Any:
        return score_counterfactuals(model, *spans, placeholder_id=job.placeholder_id)

    def gain() -> tuple[list[Tensor], ScoringWork]:
        asked = batch()
        found = prefix_gain(access, replace(asked, reasoning_ends=[marker[b] for b in asked.numbers]))
        return asked.to_callers_order(found.values), found.work

    runs: dict[str, Callable[[], tuple[list[Tensor], ScoringWork]]] = {
        "CF": lambda: _importances(cf()),
        "prefix_gain": gain,
    }
    gains = _Check()
    doubled = definitions.in_float64(model)
    for b, found in enumerate(runs["prefix_gain"]()[0]):
        truth, slow = (definitions.prefix_gains(one, job, b).double() for one in (doubled, model))
        gains.add(found, truth, float((slow - truth).abs().max()), 1.0)
    checked = {
        "prefix_gain": gains.record("prefix_gain"),
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
        with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
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


def _linear(rows: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * Shape(rows).numel() * weight[0]


def _add_product(_: Shape, left: Shape, right: Shape, *__: Any, **___: Any) -> int:
    return 2 * Shape(left).numel() * right[1]


def _head(hidden: Shape, lm_head: Shape, *_: Any, **__: Any) -> int:
    return 2 * hidden[0] * Shape(lm_head).numel()


FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.mkldnn._linear_pointwise: _linear,
    torch.ops.aten.addmm_: _add_product,
    torch.ops.cfa_kernels.linear_logprob: _head,
}
"""Operations of the ops that torch has no count for."""
