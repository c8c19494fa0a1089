"""Collect the ways to score masked spans that a user could pick instead, one function each, with one signature.

A peer takes `(model, job)` and returns, per completion, what it observes: normally (1 + K_b,) fp32 answer
log-probs in nats, the unmasked one first. Peers built on other people's packages report in those packages' own
terms; `Peer.view` states those terms as a function of the log-probs, so that `reference.py` can check each.
"""

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from benchmarks.harness.race import Absent, release_memory, wall_seconds
from benchmarks.harness.workloads import Job, variants
from cfa_kernels import Rows, score_counterfactuals
from cfa_kernels.model.decode_attention import cache_argument

Observed = list[Tensor]
"""One 1-D tensor per completion."""


@dataclass(frozen=True)
class Peer:
    """A contender for the scoring job.

    Attributes:
        run: `(model, job)` to what it observes.
        view: `(scores, job, b)` to what it should observe of completion `b` whose (1 + K_b,) log-probs are
            `scores`. Continuous; piecewise differentiable.
        scores_in_model_dtype: it rounds log-probs to the model's dtype before it sums them.
        packed: it feeds prompt, completions and branches as one tree.
    """

    run: Callable[[PreTrainedModel, Job], Observed]
    view: Callable[[Tensor, Job, int], Tensor] = lambda scores, job, b: scores
    scores_in_model_dtype: bool = False
    packed: bool = False


def _answer_logprob(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the targets' log-probs, fp32 scalar. logits: (A, V) at the rows that predict them."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype).log_softmax(-1).gather(-1, targets[:, None]).sum()


def _targets(job: Job, b: int) -> Tensor:
    return job.completions[b][job.answers[b].start : job.answers[b].end]


# 1, 2: one full forward per span


@torch.no_grad()
def per_span(model: PreTrainedModel, job: Job, *, keep: bool = False) -> Observed:
    """The definition: one full forward for the completion and one for each of its spans.

    With `keep`, rows end where the answer's last token is predicted, and logits are only of the rows that predict it.
    """
    observed = []
    for b, (prompt, answer) in enumerate(zip(job.prompts, job.answers, strict=True)):
        first, count, scores = len(prompt) + answer.start - 1, answer.end - answer.start, list[Tensor]()
        for row in variants(job, b):
            ids, options = (row[: answer.end - 1], {"logits_to_keep": count}) if keep else (row, {})
            logits = model(torch.cat([prompt, ids])[None], use_cache=False, **options).logits[0]
            scores.append(_answer_logprob(logits if keep else logits[first : first + count], _targets(job, b)))
        observed.append(torch.stack(scores))
    return observed


per_span_logits_to_keep = functools.partial(per_span, keep=True)


# 3: padded batches


@dataclass(frozen=True)
class _PaddedRow:
    """One row to score: completion `b` with its span `k - 1` masked, or as it is for `k = 0`."""

    b: int
    k: int
    ids: Tensor
    first: int  # position that predicts the answer's first token
    targets: Tensor


def _padded_batches(batch_size: int, job: Job) -> Iterator[tuple[list[_PaddedRow], Tensor]]:
    """Rows sorted by length, padded on the right, up to the last one that predicts a target.

    Rows of one batch never see the padding of another, which comes after them, so no mask is needed.
    """
    rows = []
    for b, (prompt, answer) in enumerate(zip(job.prompts, job.answers, strict=True)):
        for k, row in enumerate(variants(job, b)):
            ids = torch.cat([prompt, row[: answer.end - 1]])
            rows.append(_PaddedRow(b, k, ids, len(prompt) + answer.start - 1, _targets(job, b)))
    rows.sort(key=lambda row: -len(row.ids))
    for i in range(0, len(rows), batch_size):
        batch = rows[i : i + batch_size]
        ids = [row.ids for row in batch]
        yield batch, nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=job.placeholder_id)


@torch.no_grad()
def padded_logits_to_keep(batch_size: int, model: PreTrainedModel, job: Job) -> Observed:
    """Batches of rows sorted by length, with logits of the positions that predict an answer in some row of a batch."""
    observed = [[torch.empty(0)] * (1 + len(spans)) for spans in job.spans]
    for batch, ids in _padded_batches(batch_size, job):
        chosen_rows = sorted({t for row in batch for t in range(row.first, row.first + len(row.targets))})
        column = {t: j for j, t in enumerate(chosen_rows)}
        logits = model(ids, use_cache=False, logits_to_keep=torch.tensor(chosen_rows, device=ids.device)).logits
        for r, row in enumerate(batch):
            start = column[row.first]
            observed[row.b][row.k] = _answer_logprob(logits[r, start : start + len(row.targets)], row.targets)
    return [torch.stack(scores) for scores in observed]


Padded = Callable[[int, PreTrainedModel, Job], Observed]


def best_batch_size(
    run: Padded, model: PreTrainedModel, job: Job, sizes: tuple[int, ...]
) -> tuple[int, dict[int, float]]:
    """The batch size that is fastest here, and the seconds of each that fits in memory.

    On a GPU the second of two runs, the first of which may still load kernels.
    """
    device = next(model.parameters()).device
    seconds: dict[int, float] = {}
    for size in sizes:
        try:
            for _ in range(2 if device.type == "cuda" else 1):
                seconds[size] = wall_seconds(device, functools.partial(run, size, model, job))
        except torch.OutOfMemoryError:
            seconds.pop(size, None)
            release_memory(device)
            break
    return min(seconds, key=seconds.__getitem__), seconds


# 7: KV reuse


@torch.no_grad()
def kv_reuse(model: PreTrainedModel, job: Job) -> Observed:
    """A `DynamicCache` per prompt: each completion, then its spans from last to first, each fed from its start.

    Cutting the cache back to a span's start leaves only keys and values of unmasked tokens, because every earlier
    branch started later; so nothing is copied.
    """
    observed = []
    cache, cached_prompt, taken = DynamicCache(), None, cache_argument(model)
    for b, (prompt, answer) in enumerate(zip(job.prompts, job.answers, strict=True)):
        same = cached_prompt is not None and torch.equal(cached_prompt, prompt)
        if same:
            _cut(cache, len(prompt))
        else:
            cache, cached_prompt = DynamicCache(), prompt
        base, *masked = variants(job, b)
        ids = base[: answer.end - 1] if same else torch.cat([prompt, base[: answer.end - 1]])
        count, targets = answer.end - answer.start, _targets(job, b)
        logits = model(ids[None], **{taken: cache}, use_cache=True, logits_to_keep=count).logits[0]
        scores = [_answer_logprob(logits, targets)] * (1 + len(masked))
        for k in sorted(range(len(masked)), key=lambda k: -job.spans[b][k].start):
            start = job.spans[b][k].start
            _cut(cache, len(prompt) + start)
            ids = masked[k][start : answer.end - 1]
            logits = model(ids[None], **{taken: cache}, use_cache=True, logits_to_keep=count).logits[0]
            scores[1 + k] = _answer_logprob(logits, targets)
        observed.append(torch.stack(scores))
    return observed


def _cut(cache: DynamicCache, length: int) -> None:
    """Keep the first `length` positions."""
    if (surplus := cache.get_seq_length() - length) > 0:
        cache.crop(-surplus)


# 8: the same tree by FlexAttention


@dataclass(frozen=True)
class Forest:
    """Trees of one job as one packed row of N tokens in S segments."""

    ids: Tensor  # (N,)
    positions: Tensor  # (N,)
    segment: Tensor  # (N,)
    offset: Tensor  # (N,) place within the segment
    visible: Tensor  # (S, S): how many tokens of segment [column] a token of segment [row] sees
    rows: Tensor  # rows that predict answer tokens, of each score in turn
    targets: Tensor


def packed_forest(job: Job) -> Forest:
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    lineage: list[dict[int, int]] = []  # of each segment: visible tokens by segment
    starts: list[int] = []
    needed: list[Tensor] = []
    total = 0

    def add(tokens: Tensor, position: int, sees: dict[int, int]) -> int:
        nonlocal total
        ids.append(tokens)
        positions.append(torch.arange(position, position + len(tokens)))
        lineage.append(sees)
        starts.append(total)
        total += len(tokens)
        return len(ids) - 1

    prompt_segments: dict[tuple[int, ...], int] = {}
    for b, (prompt, answer) in enumerate(zip(job.prompts, job.answers, strict=True)):
        key = tuple(prompt.tolist())
        if key not in prompt_segments:
            prompt_segments[key] = add(prompt, 0, {})
        root = {prompt_segments[key]: len(prompt)}
        base, *masked = variants(job, b)
        trunk = add(base[: answer.end - 1], len(prompt), root)
        first = answer.start - 1
        needed.append(torch.arange(starts[trunk] + first, total))
        for span, row in zip(job.spans[b], masked, strict=True):
            sees = {**root, trunk: span.start} if span.start else root
            branch = add(row[span.start : answer.end - 1], len(prompt) + span.start, sees)
            needed.append(torch.arange(starts[branch] + first - span.start, total))
    visible = torch.zeros(len(ids), len(ids), dtype=torch.int32)
    for i, lines in enumerate(lineage):
        for j, count in lines.items():
            visible[i, j] = count
    device = job.prompts[0].device
    lengths = torch.tensor([len(tokens) for tokens in ids])
    segment = torch.repeat_interleave(torch.arange(len(ids)), lengths)
    offset = torch.arange(total) - torch.repeat_interleave(torch.tensor(starts), lengths)
    targets = [_targets(job, b) for b in range(len(job.completions)) for _ in range(1 + len(job.spans[b]))]
    made = (torch.cat(ids), torch.cat(positions), segment, offset, visible, torch.cat(needed), torch.cat(targets))
    return Forest(*(tensor.to(device) for tensor in made))


@torch.no_grad()
def flex_tree(model: PreTrainedModel, job: Job) -> Observed:
    """Prompts, completions and branches packed by hand into one row, under a FlexAttention block mask.

    Compiled for each length anew: for lengths known at run time, the compiler writes wrong C++ on a CPU.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    forest = packed_forest(job)
    device = forest.ids.device
    segment, offset, visible = forest.segment, forest.offset, forest.visible

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        causal = (segment[query] == segment[key]) & (key <= query)
        return causal | (offset[key] < visible[segment[query], segment[key]])

    total = len(forest.ids)
    mask = create_block_mask(sees, None, None, total, total, device=device, _compile=device.type == "cuda")
    with using_attention(model, "flex_attention"), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        hidden = model.base_model(
            forest.ids[None], attention_mask=mask, position_ids=forest.positions[None], use_cache=False
        ).last_hidden_state[0]
    logits = model.get_output_embeddings()(hidden[forest.rows])
    logprobs = logits.float().log_softmax(-1).gather(-1, forest.targets[:, None])[:, 0]
    answers = zip(job.answers, job.spans, strict=True)
    counts = [answer.end - answer.start for answer, spans in answers for _ in range(1 + len(spans))]
    scores = torch.stack([part.sum() for part in logprobs.split(counts)])
    return list(scores.split([1 + len(spans) for spans in job.spans]))


@contextlib.contextmanager
def using_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Switch a model's attention implementation, and back."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


# 4: aligntune, the method's authors' own package


@functools.cache
def authors_package() -> ModuleType:
    """The module with its two importance functions, loaded by itself: the package imports far more."""
    spec = importlib.util.find_spec("aligntune")
    if spec is None or not spec.submodule_search_locations:
        raise Absent("aligntune is not installed; it pins an older trl: pip install --no-deps aligntune")
    path = Path(spec.submodule_search_locations[0], "backends/trl/rl/counterfact_grpo/custom_trainer.py")
    if not path.is_file():
        raise Absent("this aligntune has no backends/trl/rl/counterfact_grpo/custom_trainer.py")
    alone = importlib.util.spec_from_file_location("aligntune_counterfactual", path)
    assert alone is not None
    assert alone.loader is not None
    module = importlib.util.module_from_spec(alone)
    sys.modules[alone.name] = module  # its dataclasses look themselves up there
    try:
        alone.loader.exec_module(module)
    except ImportError as error:
        del sys.modules[alone.name]
        raise Absent(f"aligntune does not import: {error}") from error
    return module


def _aligntune_rows(model: PreTrainedModel, job: Job, importance: Callable[[Tensor, int], Any]) -> Observed:
    """Call `importance(ids, prompt_length)` per completion, with the job's spans in place of its own detection.

    One unpadded row at a time: on padded rows it takes the padding for a part of the answer.
    """
    observed = []
    for b, prompt in enumerate(job.prompts):
        ids = torch.cat([prompt, job.completions[b]])[None]
        spans = [(len(prompt) + span.start, len(prompt) + span.end) for span in job.spans[b]]
        with mock.patch.object(
            authors_package(), "detect_calculation_spans", lambda *args, found=spans, **kwargs: found
        ):
            values = importance(ids, len(prompt))
        observed.append(torch.as_tensor(values)[len(prompt) :])
    return observed


def aligntune_batched(model: PreTrainedModel, job: Job) -> Observed:
    """`compute_batched_counterfactual_importance`: the same in chunks of 8."""
    run = authors_package().compute_batched_counterfactual_importance
    return _aligntune_rows(model, job, lambda ids, length: run(model, job.tokenizer, ids, length)[0][0])


def aligntune_importance(scores: Tensor, job: Job, b: int) -> Tensor:
    """Compute what aligntune reports per completion token: the drop per span token, stretched to [0.5, 1].

    Its drop is base minus masked, on top of a floor that every reasoning token has; 0 from the marker on.
    """
    reasoning = job.answers[b].start - 1
    raw = torch.full((reasoning,), 0.2, dtype=torch.float64)
    for k, span in enumerate(job.spans[b]):
        raw[span.start : span.end] += (scores[0] - scores[1 + k]) / (span.end - span.start)
    importance = torch.zeros(len(job.completions[b]), dtype=torch.float64)
    importance[:reasoning] = 0.5 + 0.5 * (raw - raw.min()) / (raw.max() - raw.min())
    return importance


# 9: lm-eval


def lm_eval_loglikelihood(model: PreTrainedModel, job: Job) -> Observed:
    """`HFLM._loglikelihood_tokens`: token-exact requests in batches of 8, sorted by length."""
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise Absent(f"lm-eval does not import: {error}") from error
    evaluator = HFLM(pretrained=model, tokenizer=job.tokenizer, backend="causal", batch_size=8)
    requests = []
    for b, (prompt, answer) in enumerate(zip(job.prompts, job.answers, strict=True)):
        for row in variants(job, b):
            context = torch.cat([prompt, row[: answer.start]]).tolist()
            requests.append((("", ""), context, _targets(job, b).tolist()))
    scored = torch.tensor([logprob for logprob, _ in evaluator._loglikelihood_tokens(requests, disable_tqdm=True)])
    return list(scored.split([1 + len(spans) for spans in job.spans]))


# 6: ours


def ours(model: PreTrainedModel, job: Job) -> Observed:
    """`cfa_kernels.score_counterfactuals`."""
    scores = score_counterfactuals(
        model, Rows(job.prompts, job.completions), job.spans, job.answers, mask=job.placeholder_id
    )
    return [torch.cat([base[None], masked]) for base, masked in zip(scores.base, scores.masked, strict=True)]


PEERS: dict[str, Peer] = {
    "per span": Peer(per_span),
    "per span with logits_to_keep": Peer(per_span_logits_to_keep),
    "KV reuse": Peer(kv_reuse),
    "FlexAttention tree": Peer(flex_tree, packed=True),
    "aligntune batched": Peer(aligntune_batched, aligntune_importance, scores_in_model_dtype=True),
    "lm-eval": Peer(lm_eval_loglikelihood, scores_in_model_dtype=True),
    "ours": Peer(ours, packed=True),
}
REFERENCE = "per span"

BEST_PADDED: dict[str, Padded] = {"best padded batch with logits_to_keep": padded_logits_to_keep}
"""Peers whose batch size is searched for each model and job before the race."""
