"""Compare one model of the table with its own plain forwards: batches, comparisons, verdicts.

`table.py` builds the models, runs them one by one and writes the verdicts.
"""

import copy
import math
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

import cfa_kernels
from benchmarks.models.small_models import TEXT_IDS, WINDOW
from benchmarks.speed.step_reference import taken_gradients
from cfa_kernels import Batch, Rows, Span, packed_logprobs, score_counterfactuals

TOLERANCE = 1e-3  # nats, at float32
GRADIENT_TOLERANCE = 1e-4  # of a gradient's norm, where the model's own rounding is not worse
ROUNDINGS = 16  # so many times what a step of one unit in the last place of every weight moves the gradients by
MOST = 1e-2  # of a gradient's norm, whatever the model's rounding
BUDGETS = (None, 1, 50)
TEMPERATURE = 0.7

EXACT, REFUSED, WRONG, UNCLEAR = "exact", "refused", "WRONG", "unclear error"
NOT_RUNNABLE, NOT_BUILDABLE, NOT_JUDGED = "not runnable", "not buildable", "not judged"
MEANINGS = {
    EXACT: f"the numbers of one full forward per span, or row, to {TOLERANCE:g} nats in float32; gradients of rows too",
    REFUSED: "`NotImplementedError` before the first score, naming the model and the reason",
    WRONG: "other numbers, without an error: a defect",
    UNCLEAR: "an error that does not name the model: a defect",
    NOT_RUNNABLE: "the model's own forward does not take token ids alone, or gives nan",
    NOT_BUILDABLE: "transformers does not build the type here",
    NOT_JUDGED: "the process died or ran out of time",
}


@dataclass(frozen=True)
class Verdict:
    """Result of one comparison: a key of `MEANINGS`, why, and the largest error in nats if numbers came."""

    status: str
    why: str = ""
    error: float | None = None
    gradient_error: float | None = None  # the largest of a parameter, as a share of its gradient's norm

    @staticmethod
    def of(error: float, gradient_error: float | None = None, rounding: float = 0.0) -> "Verdict":
        """`EXACT` within the tolerances, else `WRONG`. `rounding` is what the model's own does to its gradients."""
        error = _rounded(error)
        gradient_error = gradient_error if gradient_error is None else _rounded(gradient_error)
        if not error <= TOLERANCE:
            return Verdict(WRONG, f"off by {error:g} nats", error, gradient_error)
        if gradient_error is not None and not gradient_error <= gradient_tolerance(rounding):
            why = f"gradients off by {gradient_error:g} of their norm, the model's own rounding {rounding:.2g}"
            return Verdict(WRONG, why, error, gradient_error)
        return Verdict(EXACT, error=error, gradient_error=gradient_error)

    @staticmethod
    def refusal(error: Exception, model: PreTrainedModel) -> "Verdict":
        """`REFUSED` if this package raised `NotImplementedError` with the model's class in it, else `UNCLEAR`."""
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        ours = raised_in.is_relative_to(Path(cfa_kernels.__file__).parent)
        clear = ours and isinstance(error, NotImplementedError) and type(model).__name__ in str(error)
        return Verdict(REFUSED if clear else UNCLEAR, message)


def gradient_tolerance(rounding: float) -> float:
    """The share of a gradient's norm that may be off in a model whose own rounding moves it by `rounding`."""
    return min(max(GRADIENT_TOLERANCE, ROUNDINGS * rounding), MOST)


# Batches


def ragged_batch(seed: int) -> Batch:
    """Rows that share prompts and prefixes of completions, longer than any window: what a packed tree must get right.

    Spans at the start, up to the answer, over one another, twice and after the answer; answers at the end, in the
    middle and alone; a prompt that goes on in another row's prompt; a row twice; a short row; a row without an answer.
    Pieces of one token, one after the other, at the end of a branch and as whole completions; completions that share
    their first token, equal ones, one that is a prefix of another; a prompt of one token that several rows have.
    """
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> Tensor:
        return torch.randint(TEXT_IDS.start, TEXT_IDS.stop, (length,), generator=generator)

    prompt, shared = ids(34 + seed), ids(20)
    first = torch.cat([shared, ids(26 + seed)])
    long = ids(WINDOW * 3)
    rows: list[tuple[Tensor, Tensor, Span | None, list[tuple[int, int]]]] = [
        (prompt, first, Span(41, 44), [(0, 3), (5, 20), (12, 25), (12, 25), (40, 41), (44, 46)]),
        (prompt, torch.cat([shared, ids(12)]), Span(15, 18), [(0, 6), (14, 15), (19, 24)]),
        (prompt[:17], torch.cat([prompt[17:], shared, ids(4)]), Span(24, 26), [(2, 17), (20, 24)]),
        (ids(3), long, Span(66, 69), [(0, 66), (1, 2), (30, 60)]),
        (prompt, torch.cat([shared[:9], ids(11)]), None, [(2, 4)]),
        (prompt, first, Span(30, 31), [(0, 30), (29, 30)]),
        (ids(5), ids(20), Span(15, 18), [(2, 9)]),
        (ids(1), ids(1), Span(0, 1), []),
    ]
    fork, one, end = ids(7), ids(1), ids(1)
    rows += [
        (prompt, fork, Span(4, 6), [(1, 2), (3, 4)]),  # the latter's branch is one token
        (prompt, torch.cat([fork[:1], ids(4)]), Span(3, 5), [(0, 1)]),
        (prompt, torch.cat([fork[:2], ids(3)]), Span(4, 5), [(3, 4)]),
        (prompt, fork[:4], Span(3, 4), [(1, 3)]),
        (prompt, torch.cat([end, ids(1)]), Span(1, 2), [(0, 1)]),
        (prompt, fork[:1], Span(0, 1), []),
        (one, fork, Span(4, 6), [(0, 1), (3, 4)]),
        (one, torch.cat([fork[:1], ids(3)]), Span(2, 4), [(1, 2)]),
        (one, fork, None, []),
    ]
    prompts, completions, answers, edges = map(list, zip(*rows, strict=True))
    units = [[Span(*pair) for pair in row] for row in edges]
    placeholder, budget = (0, 3, TEXT_IDS.start)[seed % 3], BUDGETS[seed % 3]
    return Batch(Rows(prompts, completions), units=units, answers=answers, placeholder=placeholder, token_budget=budget)


# Comparisons


class Plain:
    """The definition: one full forward of the model as it is for each sequence, log-softmax in float64."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], Tensor] = {}

    def logits(self, ids: Tensor) -> Tensor:
        """(L, V) float64 logits of the sequence `ids` (L,). Raises `ArithmeticError` for nan."""
        key = tuple(ids.tolist())
        if key not in self._known:
            with torch.no_grad():
                logits = self._model(input_ids=ids[None], use_cache=False).logits[0].double()
            if len(logits) != len(ids):
                raise ValueError(f"{len(logits)} rows of logits for {len(ids)} tokens")
            if torch.isnan(logits).any():
                raise ArithmeticError("the model's own forward gives nan")
            self._known[key] = logits
        return self._known[key]

    def logprobs(self, ids: Tensor, temperature: float = 1.0) -> Tensor:
        """(L - 1,) log-probs of every token but the first."""
        rows = (self.logits(ids)[:-1] / temperature).log_softmax(-1)
        return rows.gather(1, ids[1:, None])[:, 0]


def judge_scores(model: PreTrainedModel, plain: Plain, batches: Iterable[Batch]) -> tuple[Verdict, float | None]:
    """Compare `score_counterfactuals` with one forward per span; also the median size of a drop."""
    worst, drops = 0.0, []
    for batch in batches:
        try:
            scores = score_counterfactuals(
                model, batch.rows, batch.units, batch.answers, mask=batch.placeholder, token_budget=batch.token_budget
            )  # fmt: skip
        except Exception as error:
            return Verdict.refusal(error, model), None
        columns = zip(batch.rows.prompts, batch.rows.completions, batch.units, batch.answers, strict=True)
        for b, (prompt, completion, spans, answer) in enumerate(columns):
            whole = plain.logprobs(torch.cat([prompt, completion]))[len(prompt) - 1 :]
            pairs = list[tuple[Tensor, Tensor]]()
            if answer is None:
                empty = torch.cat([scores.base[b : b + 1], scores.masked[b], scores.drop[b]])
                if not torch.isnan(empty).all():
                    return Verdict(WRONG, "a row without an answer has a score"), None
            else:
                base = whole[answer.start : answer.end].sum()
                masked = [_masked_score(plain, prompt, completion, span, answer, batch) for span in spans]
                expected = torch.stack([base, *masked])
                pairs += [(scores.base[b], base), (scores.masked[b], expected[1:])]
                pairs += [(scores.drop[b], base - expected[1:])]
                drops += (base - expected[1:]).abs().tolist()
            for ours, theirs in pairs:
                worst = max(worst, _gap(ours, theirs))
    return Verdict.of(worst), _rounded(float(torch.tensor(drops).median()))


def _masked_score(plain: Plain, prompt: Tensor, completion: Tensor, span: Span, answer: Span, batch: Batch) -> Tensor:
    """Log-prob of the answer by a full forward with `span` replaced."""
    branch = torch.cat([prompt, completion])
    branch[len(prompt) + span.start : len(prompt) + span.end] = batch.placeholder
    at = len(prompt) - 1
    return plain.logprobs(branch)[at + answer.start : at + answer.end].sum()


def _rounded(value: float) -> float:
    """Two digits: the others differ from machine to machine."""
    return float(f"{value:.2g}")


def _gap(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference; infinity for another shape or a nan."""
    if ours.shape != theirs.shape:
        return float("inf")
    gap = (ours.double() - theirs).abs()
    return float(gap.nan_to_num(float("inf")).max()) if gap.numel() else 0.0


def judge_training(model: PreTrainedModel, plain: Plain, batches: Sequence[Batch]) -> Verdict:
    """Compare what the trainer differentiates with the model's own forward of each row: log-probs and gradients."""
    worst = worst_gradient = 0.0
    try:
        for batch in batches:
            ours = packed_logprobs(model, batch.rows, temperature=TEMPERATURE)
            _weighted(ours).backward()
            result = taken_gradients(model)
            for row, prompt, completion in zip(ours, batch.rows.prompts, batch.rows.completions, strict=True):
                theirs = plain.logprobs(torch.cat([prompt, completion]), TEMPERATURE)[len(prompt) - 1 :]
                worst = max(worst, _gap(row.detach(), theirs))
            worst_gradient = max(worst_gradient, gradient_gap(result, plain_gradients(model, batch)))
        small = worst_gradient <= GRADIENT_TOLERANCE  # then rounding need not explain it
        return Verdict.of(worst, worst_gradient, 0.0 if small else rounding_of_gradients(model, batches[0]))
    except Exception as error:
        return Verdict.refusal(error, model)


def _weighted(rows: Sequence[Tensor], first: int = 0) -> Tensor:
    """A scalar that every log-prob enters with a factor of its own; `rows` are those of a batch from `first` on."""
    total = torch.zeros(())
    for index, row in enumerate(rows, first):
        generator = torch.Generator().manual_seed(index)
        total = total + (row * torch.empty(len(row)).uniform_(-1, 1, generator=generator)).sum()
    return total


def plain_gradients(model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
    """The definition of what `_weighted` gives the parameters: a full forward and backward for each row."""
    for index, (prompt, completion) in enumerate(zip(batch.rows.prompts, batch.rows.completions, strict=True)):
        ids = torch.cat([prompt, completion])
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float() / TEMPERATURE
        logprobs = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[len(prompt) - 1 :, 0]
        _weighted([logprobs], index).backward()
    return taken_gradients(model)


def gradient_gap(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest distance of a parameter's two gradients by the norm of `theirs`; infinity for a nan.

    A gradient below a thousandth of the largest is measured by that: a key's bias, say, is given rounding only.
    """
    largest = max(float(gradient.norm()) for gradient in theirs.values())
    gaps = [
        float((ours[name] - gradient).norm()) / max(float(gradient.norm()), 1e-3 * largest)
        for name, gradient in theirs.items()
    ]
    return max(math.inf if math.isnan(gap) else gap for gap in gaps)


def rounding_of_gradients(model: PreTrainedModel, batch: Batch) -> float:
    """Measure how far the model's own gradients move when each weight moves to a neighbouring number, at random."""
    before = plain_gradients(model, batch)
    generator = torch.Generator().manual_seed(0)
    weights = copy.deepcopy(model.state_dict())
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                up = torch.rand(parameter.shape, generator=generator) < 0.5
                parameter.copy_(torch.nextafter(parameter, torch.where(up, math.inf, -math.inf).to(parameter)))
        return gradient_gap(plain_gradients(model, batch), before)
    finally:
        model.load_state_dict(weights)
