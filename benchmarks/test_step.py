"""What a training step costs: credit and update on recorded rollouts, ours against what trainers do today.

Table 8 of the CF paper, side by side in one run. Every contender replays the same completions with their own rewards
and leaves a gradient, which is held to padded autograd in higher precision before anything is timed. No optimizer
steps; a second table adds the sampling that comes before.
"""

import contextlib
import copy
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from benchmarks.peers import Observed, aligntune_importance, per_span_logits_to_keep
from benchmarks.race import (
    Absent,
    Budget,
    Contender,
    Figures,
    Lap,
    WrongAnswer,
    race,
    release_memory,
    replay_clock,
)
from benchmarks.selection import chosen_peers, workload_set
from benchmarks.step_peers import (
    AUTHORS,
    EXACT,
    PLAIN,
    SEPARATE,
    STEP_PEERS,
    TRL,
    VARLEN,
    Replay,
    StepPeer,
    Stopwatch,
    Weights,
    authors_weights,
)
from benchmarks.workloads import SEED, STEP_SEED, Rollouts, gsm8k_rollouts, policy, shaped_rollouts
from cfa_kernels import span_weights
from cfa_kernels.hf import backbone, causal_lm
from cfa_kernels.proof import prove_trainable
from trainer.rollouts import generate

GRADIENT_SLACK = 4.0
"""How much larger than that of padded autograd in the policy's own precision a contender's error may be."""


@dataclass(frozen=True)
class Target:
    """`of` is to cost at most `ceiling` times `to`."""

    of: str
    to: str
    ceiling: float


@dataclass(frozen=True)
class Workload:
    """A model, how it is trained, the rollouts, and what the step is to reach there."""

    model: str
    lora: bool
    rollouts: Callable[[], Rollouts]
    dtype: torch.dtype
    micro_batches: tuple[int, ...]
    targets: tuple[Target, ...] = ()
    fewer_rows: float = 0.0
    """Share of the rows of separate scoring that scoring from the training forward is to save at least."""


_MIXED = (
    Target(PLAIN, TRL, 0.22),
    Target(EXACT, TRL, 0.35),
    Target(EXACT, AUTHORS, 0.20),
    Target(PLAIN, VARLEN, 0.75),
)
_AS_THEY_COME = (Target(EXACT, TRL, 0.20), Target(EXACT, AUTHORS, 0.20))
_GPU = (Target(EXACT, TRL, 1.0),)
_GPU_LONG = (Target(PLAIN, VARLEN, 1 / 1.6), Target(PLAIN, TRL, 1 / 2.5), *_GPU)


def _gsm8k(model: str, problems: int, dtype: torch.dtype, sizes: tuple[int, ...], held: bool) -> dict[str, Workload]:
    """Adapters and full training, all groups mixed and groups as they come; `held` sets the CPU's targets."""
    found = {}
    for lora in (True, False):
        for mixed in (True, False):
            targets = (_MIXED if mixed else _AS_THEY_COME) if held and lora else () if held else _GPU
            how = f"{model} {'LoRA' if lora else 'full'}, {'all mixed' if mixed else 'as they come'}"
            found[how] = Workload(
                model, lora, functools.partial(gsm8k_rollouts, problems, mixed=mixed), dtype, sizes, targets, 0.25
            )
    return found


WORKLOADS: dict[str, dict[str, Workload]] = {
    "smoke": {
        "qwen3-tiny LoRA": Workload(
            "qwen3-tiny", True, functools.partial(gsm8k_rollouts, 2, mixed=False), torch.float32, (4,)
        )
    },
    "cpu": _gsm8k("qwen3-40m", 4, torch.float32, (4, 8, 16), held=True),
    "cuda": {
        **{
            name: workload
            for model in ("Qwen3-1.7B", "Qwen2.5-3B", "Llama-3.2-3B")
            for name, workload in _gsm8k(model, 8, torch.bfloat16, (8, 16, 32), held=False).items()
        },
        "Qwen3-1.7B LoRA, G = 8, P = T = 512": Workload(
            "Qwen3-1.7B",
            True,
            functools.partial(shaped_rollouts, 4, group=8, prompt=512, completion=512, spans=6),
            torch.bfloat16,
            (8, 16, 32),
            _GPU_LONG,
        ),
    },
}


# What is right


Gradients = dict[str, Tensor]


def padded_autograd(model: nn.Module, rollouts: Rollouts, weights: Weights | None) -> tuple[float, Gradients]:
    """Loss and gradients by their definition: one padded forward per group, every logit, autograd.

    Sequences are padded behind their ends, which causality hides from them.
    """
    causal, job = causal_lm(model), rollouts.job
    loss_sum = 0.0
    model.zero_grad()
    for first in range(0, len(job.prompts), rollouts.group):
        rows = range(first, first + rollouts.group)
        ids = [torch.cat([job.prompts[b], job.completions[b]]) for b in rows]
        logits = causal(nn.utils.rnn.pad_sequence(ids, batch_first=True), use_cache=False).logits
        loss = torch.zeros((), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
        for line, b in zip(logits, rows, strict=True):
            completion, start = job.completions[b], len(job.prompts[b]) - 1
            lines = line[start : start + len(completion)].to(loss.dtype)
            logprobs = lines.log_softmax(-1).gather(-1, completion[:, None])[:, 0]
            ratio = (logprobs - logprobs.detach()).exp()  # on-policy: 1, and no clip
            weight = ratio.new_ones(()) if weights is None else weights[b].to(ratio)
            loss = loss - (ratio * weight).sum() * rollouts.advantages[b].to(ratio)
        loss = loss / rollouts.tokens
        loss.backward()
        loss_sum += loss.item()
    return loss_sum, taken_gradients(model)


def taken_gradients(model: nn.Module) -> Gradients:
    """Every trainable parameter's gradient, taken off it."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = None
    return found


def weights_of_kind(kind: str, model: nn.Module, rollouts: Rollouts) -> Weights | None:
    """The weights a kind of contender should use, from one full forward per span in the model's precision."""
    if kind == "plain":
        return None
    job = rollouts.job
    scores = per_span_logits_to_keep(causal_lm(model), job)
    if kind == "authors":
        return authors_weights(job, _authors_importance(scores, rollouts))
    drops = [(row[1:] - row[0]).cpu() for row in scores]
    active = set(rollouts.active)
    return [
        span_weights(drops[b], job.spans[b], job.answers[b], len(completion)) if b in active
        else torch.ones(len(completion))
        for b, completion in enumerate(job.completions)
    ]  # fmt: skip


def _authors_importance(scores: Observed, rollouts: Rollouts) -> Observed:
    return [aligntune_importance(row.double().cpu(), rollouts.job, b) for b, row in enumerate(scores)]


@dataclass(frozen=True)
class Truth:
    """Loss, weights and gradients of one kind of step in higher precision, and how far the policy's own is off."""

    loss: float
    weights: Weights | None
    gradients: Gradients
    loss_error: float
    weight_error: float
    gradient_error: float  # the worst parameter's

    @staticmethod
    def of(kind: str, model: nn.Module, exact: nn.Module, rollouts: Rollouts) -> "Truth":
        """By the definition, in `model`'s precision and with `exact`, the same model in a higher one."""
        weights, low_weights = (weights_of_kind(kind, m, rollouts) for m in (exact, model))
        loss, gradients = padded_autograd(exact, rollouts, weights)
        low_loss, low = padded_autograd(model, rollouts, low_weights)
        return Truth(
            loss,
            weights,
            gradients,
            abs(low_loss - loss),
            _largest_difference(low_weights, weights),
            max(relative_error(low[name], gradient) for name, gradient in gradients.items()),
        )

    def check(self, result: "StepResult", eps: float) -> dict[str, float]:
        """Hold a step to this; `eps` is the rounding step of the policy's precision."""
        if result.gradients.keys() != self.gradients.keys():
            raise WrongAnswer(f"gradients of {sorted(self.gradients.keys() ^ result.gradients.keys())[:3]} differ")
        allowed = GRADIENT_SLACK * (self.gradient_error + eps)
        errors = {name: relative_error(result.gradients[name], truth) for name, truth in self.gradients.items()}
        worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else torch.inf)
        if not errors[worst] <= allowed:
            raise WrongAnswer(f"gradient of {worst} is off by {errors[worst]:.2g} of its norm, allowed are {allowed:.2g}")
        # A sum of terms of both signs: what it may miss goes by the size of the terms, not by the sum's.
        allowed_loss = GRADIENT_SLACK * (self.loss_error + 8 * eps)
        if not abs(result.loss - self.loss) <= allowed_loss:
            raise WrongAnswer(f"loss is {result.loss:.6g}, expected {self.loss:.6g} within {allowed_loss:.2g}")
        weight_error = _largest_difference(result.weights, self.weights)
        allowed_weight = GRADIENT_SLACK * (self.weight_error + 4 * eps)
        if not weight_error <= allowed_weight:
            raise WrongAnswer(f"a token weight is off by {weight_error:.2g}, allowed are {allowed_weight:.2g}")
        return {"gradient_error": errors[worst], "gradient_error_allowed": allowed, "weight_error": weight_error}


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm of the truth."""
    if found.shape != truth.shape:
        raise WrongAnswer(f"shape {tuple(truth.shape)} expected, got {tuple(found.shape)}")
    norm = truth.norm().item()
    off = (found.to(truth.dtype) - truth).norm().item()
    return off / norm if norm else off


def _largest_difference(found: Weights | None, truth: Weights | None) -> float:
    if found is None or truth is None:
        return 0.0 if found is truth else torch.inf
    pairs = zip(found, truth, strict=True)
    return max((mine.double().cpu() - right.double().cpu()).abs().max().item() for mine, right in pairs)


# Contenders


@dataclass
class StepResult:
    """What a contender leaves behind."""

    loss: float
    weights: Weights | None
    gradients: Gradients


@dataclass
class Measured:
    """What a contender's runs took beside the race's own clock, and what the first of them fed."""

    seconds: dict[str, list[float]]
    fed: dict[str, float]


def step_contenders(
    replay: Replay, fresh: Callable[[], nn.Module], names: Sequence[str]
) -> tuple[list[Contender], dict[str, Measured]]:
    """The peers as contenders, each checked against padded autograd in higher precision."""
    dtype = next(replay.policy.parameters()).dtype
    prove_trainable(replay.causal)  # once per model; not to be counted, nor timed
    exact = copy.deepcopy(replay.policy)
    exact.to(torch.float64 if dtype == torch.float32 else torch.float32)
    truths = {}
    for kind in dict.fromkeys(STEP_PEERS[name].kind for name in names):
        with contextlib.suppress(Absent):  # the authors' package, whose contender will say so
            truths[kind] = Truth.of(kind, replay.policy, exact, replay.rollouts)
    del exact
    release_memory(replay.device)
    eps = torch.finfo(dtype).eps
    measured = {name: Measured({"credit": [], "update": []}, {}) for name in names}

    def contender(name: str) -> Contender:
        peer, notes = STEP_PEERS[name], measured[name]
        own: list[Replay] = [] if peer.own_policy else [replay]

        def run() -> StepResult:
            if not own:
                own.append(Replay(fresh(), replay.rollouts, replay.micro_batch))
            used, stopwatch = own[0], Stopwatch(replay.device)
            if notes.fed:
                loss, weights = peer.run(used, stopwatch)
                for part, seconds in stopwatch.seconds.items():
                    notes.seconds[part].append(seconds)
            else:
                with rows_fed(causal_lm(used.policy)) as fed:
                    loss, weights = peer.run(used, stopwatch)
                notes.fed.update(fed | operations(used, peer, fed))
            return StepResult(loss.item(), weights, taken_gradients(used.policy))

        def check(result: StepResult) -> dict[str, Any]:
            return truths[peer.kind].check(result, eps) | notes.fed

        return Contender(name, run, check)

    return [contender(name) for name in names], measured


@contextlib.contextmanager
def rows_fed(causal: PreTrainedModel) -> Iterator[dict[str, float]]:
    """Count the rows that go through the model, padding included, with and without gradient."""
    fed = {"rows_with_gradient": 0, "rows_without_gradient": 0, "head_rows_without_gradient": 0}

    def body(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        fed["rows_with_gradient" if torch.is_grad_enabled() else "rows_without_gradient"] += ids.numel()

    def head(module: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> None:
        fed["head_rows_without_gradient"] += 0 if torch.is_grad_enabled() else output.numel() // module.out_features

    hooks = [
        backbone(causal).register_forward_pre_hook(body, with_kwargs=True),
        causal.get_output_embeddings().register_forward_hook(head),
    ]
    try:
        yield fed
    finally:
        for hook in hooks:
            hook.remove()


def operations(replay: Replay, peer: StepPeer, fed: dict[str, float]) -> dict[str, float]:
    """Multiply-adds, twice, in the linear layers: what a step's time should go by. Attention is left out.

    A row with gradient goes through a layer forwards and back, and once more for the weight if that trains.
    """
    causal = replay.causal
    head = causal.get_output_embeddings()
    head_trains = head.weight.requires_grad
    passes_back = 2 if head_trains else 1
    inside = sum(m.weight.numel() for m in backbone(causal).modules() if isinstance(m, nn.Linear))
    job = replay.job
    rows = {
        "active": sum(len(job.completions[b]) for b in replay.rollouts.active),
        "tokens": replay.rollouts.tokens,
        "positions": fed["rows_with_gradient"] if replay.device.type == "cpu" else replay.rollouts.tokens,
    }
    body = fed["rows_without_gradient"] + (1 + passes_back) * fed["rows_with_gradient"]
    through_head = fed["head_rows_without_gradient"] + (peer.head_products + head_trains) * rows[peer.head_rows]
    return {"flops": 2.0 * inside * body + 2.0 * head.weight.numel() * through_head}


@contextlib.contextmanager
def one_pinned_thread() -> Iterator[None]:
    """A single thread that stays on one core."""
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    try:
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {min(cores)})
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


def pinned_cpu_seconds(contenders: Sequence[Contender], rounds: int) -> dict[str, list[float]]:
    """The processor's seconds of each contender on one pinned thread, in turns: what other work hardly changes."""
    found: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    with one_pinned_thread():
        for i in range(rounds):
            turn = i % max(len(contenders), 1)
            for contender in [*contenders[turn:], *contenders[:turn]]:
                start = time.process_time()
                contender.run()
                found[contender.name].append(time.process_time() - start)
    return found


def fastest_micro_batch(replay: Replay, sizes: Sequence[int]) -> tuple[int, dict[int, float]]:
    """Rows per micro-batch with which TRL's plain step is fastest, and the seconds of each that fits in memory."""
    seconds: dict[int, float] = {}
    for size in sizes:
        tried = replace(replay, micro_batch=size)
        try:
            for _ in range(2 if replay.device.type == "cuda" else 1):
                stopwatch = Stopwatch(replay.device)
                STEP_PEERS[TRL].run(tried, stopwatch)
                seconds[size] = stopwatch.seconds["update"]
                taken_gradients(replay.policy)
        except Absent:
            return sizes[0], {}
        except torch.OutOfMemoryError:
            seconds.pop(size, None)
            release_memory(replay.device)
    return min(seconds, key=seconds.__getitem__), seconds
