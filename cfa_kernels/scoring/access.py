"""Say how a model may be asked: in this process, from its training forward, or by a host's log-prob service."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..hf.model import causal_lm, input_device
from ..hf.ranks import Ranks, inside
from ..hf.sharding import is_sharded, run_inside
from ..packing.prefix_tree import Query
from .batch import ScoredBatch, branch
from .masked import CounterfactualScores, ScoringWork, query_logprobs, score_batch
from .outcomes import DIVERGENCES, Outcome
from .training_forward import PackedForward

_Result = TypeVar("_Result")

LogprobsOf = Callable[[list[Tensor], list[Tensor]], Sequence[Tensor | Sequence[float]]]
"""Function from prompts and completions, lists of 1-D int64 tensors, to log-probs (nats) of each completion, 1-D."""

LOGPROBS = "logprobs"
DISTRIBUTIONS = "distributions"
MODEL = "model"
GRADIENTS = "gradients"
CAPABILITIES = {
    LOGPROBS: "log-probs of given tokens",
    DISTRIBUTIONS: "distributions over the vocabulary, not only log-probs of given tokens",
    MODEL: "the model itself in this process",
    GRADIENTS: "gradients through the model itself, whole in this process",
}
"""Capabilities of a `ModelAccess`, and what each means."""

_EVERYTHING = frozenset(CAPABILITIES)


class ModelAccess(Protocol):
    """Way to ask a model.

    Attributes:
        capabilities: names of `CAPABILITIES`, what the model can be asked for.
        module: the model as the caller has it, perhaps wrapped; None where it is in another process.
    """

    capabilities: frozenset[str]
    module: nn.Module | None

    @property
    def model(self) -> PreTrainedModel:
        """Return the model itself, as `causal_lm` finds it; needs the capability `model`."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that the model computes in; `hf.accuracy.ACCURACY` says how exact its scores are."""
        ...

    def run(self, body: Callable[[], _Result]) -> _Result:
        """Run what asks the model, perhaps several times; where processes share it all of them call this."""
        ...

    def judge(self, estimator: Callable[[Any, ScoredBatch], Any], batch: ScoredBatch) -> Any:
        """Call an estimator that asks the model, `estimator(access, batch)`, where the model is."""
        ...

    def score(self, batch: ScoredBatch, *, outcome: Outcome = "logprob") -> CounterfactualScores:
        """Score the answers of a batch as sampled and with each unit masked, in the batch's order."""
        ...

    def query(self, bundles: Sequence[Sequence[Query]], **options: Any) -> tuple[list[list[Tensor]], ScoringWork]:
        """Answer queries as `query_logprobs` does; needs the capability `model`."""
        ...


class _Here:
    """Way to run what asks: here and now, by itself."""

    def run(self, body: Callable[[], _Result]) -> _Result:
        """Run `body()`."""
        return body()

    def judge(self, estimator: Callable[[Any, ScoredBatch], Any], batch: ScoredBatch) -> Any:
        """Call `estimator` in this process."""
        return estimator(self, batch)


class InProcess(_Here):
    """Access to a model whose weights are whole in this process, bare or wrapped as in `score_counterfactuals`."""

    capabilities = _EVERYTHING

    def __init__(self, module: nn.Module | None) -> None:
        self.module = module

    @property
    def model(self) -> PreTrainedModel:
        """Return the causal model inside its wrappers."""
        if self.module is None:
            raise ValueError("model: must be given to an estimator that asks it, got None")
        return causal_lm(self.module)

    @property
    def dtype(self) -> torch.dtype:
        """Return that of the weights, or of autocast where it is on."""
        if self.module is None:
            return torch.float32
        device = input_device(self.model).type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.model.dtype

    def score(self, batch: ScoredBatch, *, outcome: Outcome = "logprob") -> CounterfactualScores:
        """Feed the batch as packed trees of its own."""
        return score_batch(self.model, batch, outcome)

    def query(self, bundles: Sequence[Sequence[Query]], **options: Any) -> tuple[list[list[Tensor]], ScoringWork]:
        """Feed the queries as packed trees of their own."""
        return query_logprobs(self.model, bundles, **options)


class Sharded(InProcess):
    """Access to a model whose weights are in pieces on several processes (FSDP, ZeRO-3), given as its outermost module.

    Every process asks the same things in the same order, each about completions of its own or about none: `run` takes
    care of that for all that is asked inside it.

    Gradients through the model are not offered: torch's FSDP knows one backward for each call of the outermost module,
    after it. `FSDPState._root_post_backward_final_callback` (`torch/distributed/fsdp/_fully_shard/_fsdp_state.py`) runs
    at the end of any backward and gives back the outermost module's own weights, which the rest of its call reads. The
    first FSDP queues `_post_backward_final_callback` (`_runtime_utils.py`) from the outermost module's output only, and
    a backward before that leaves its layers gathered and not idle. DeepSpeed's engine counts a backward as a step's.
    """

    capabilities = _EVERYTHING - {GRADIENTS}

    def score(self, batch: ScoredBatch, *, outcome: Outcome = "logprob") -> CounterfactualScores:
        """Feed the batch as packed trees of its own, while the other processes feed theirs."""
        return self.run(lambda: score_batch(self.model, batch, outcome))

    def run(self, body: Callable[[], _Result]) -> _Result:
        """Run `body()` inside one call of the outermost module; raise on all processes what one of them raises."""
        assert self.module is not None
        return run_inside(self.module, body)


class TrainingForward(InProcess):
    """Access to the model of a `PackedForward`, whose completions are fed already: answers and queries continue them.

    Estimators that continue nothing (gradients, fills, partial branches) use the forward's model itself.
    """

    def __init__(self, forward: PackedForward) -> None:
        super().__init__(forward.causal)
        self.forward = forward
        if isinstance(inside(forward.causal), Ranks):
            self.capabilities = Sharded.capabilities

    def score(self, batch: ScoredBatch, *, outcome: Outcome = "logprob") -> CounterfactualScores:
        """Feed only the masked branches."""
        return self.forward.score_batch(batch, outcome)

    def query(self, bundles: Sequence[Sequence[Query]], **options: Any) -> tuple[list[list[Tensor]], ScoringWork]:
        """Feed only what the forward has not fed."""
        return self.forward.query_logprobs(self.model, bundles, **options)


class Elsewhere(_Here):
    """Access to a model in other processes, which cannot be asked everything."""

    module: nn.Module | None = None
    dtype = torch.float32
    only: str
    """What can be asked of it, for errors."""

    @property
    def model(self) -> PreTrainedModel:
        """Raise: the model is in other processes."""
        raise NotImplementedError(f"model: it is in other processes, and {self.only}")

    def query(self, bundles: Sequence[Sequence[Query]], **options: Any) -> tuple[list[list[Tensor]], ScoringWork]:
        """Raise: queries are asked where the model is."""
        raise NotImplementedError(f"model: it is in other processes, and {self.only}")


class LogprobService(Elsewhere):
    """Access through a host's own log-prob service, for models that are spread over other processes.

    Each answer, and each answer with a unit masked, becomes an ordinary sequence, cut after the answer; all go out in
    one request. Scores are those of `score_counterfactuals` to rounding, at the service's temperature; rotary
    frequencies that follow a sequence's length (longrope) are those of the sequence as it is cut. No work is shared
    between sequences; `work.tokens_fed` counts it.

    Args:
        logprobs_of: the service: from prompts and completions, 1-D int64 each, to a tensor or list of as many log-probs
            as each completion has tokens; called at most once for a batch that is scored.
        dtype: in which the service computes.
    """

    capabilities = frozenset({LOGPROBS})
    only = "only log-probs of whole completions can be asked for"

    def __init__(self, logprobs_of: LogprobsOf, *, dtype: torch.dtype = torch.float32) -> None:
        self._logprobs_of, self.dtype = logprobs_of, dtype

    def score(self, batch: ScoredBatch, *, outcome: Outcome = "logprob") -> CounterfactualScores:
        """Ask for each sequence; scores are on the host.

        Raises:
            ValueError: the service gives another number of sequences or tokens than it was asked for.
            NotImplementedError: an outcome that log-probs do not tell.
        """
        if outcome in DIVERGENCES:
            raise NotImplementedError(f"outcome={outcome!r} needs {CAPABILITIES[DISTRIBUTIONS]}")
        prompts, completions, starts = list[Tensor](), list[Tensor](), list[int]()
        for row in batch.rows:
            first = len(row.prompt)
            for k in (None, *range(len(row.spans))) if row.answer is not None else ():
                tokens, answer = branch(row, k, batch.mask)
                prompts.append(torch.from_numpy(row.prompt))
                completions.append(torch.from_numpy(tokens[first : answer.end]))
                starts.append(answer.start - first)
        logprobs = [torch.as_tensor(row).detach() for row in self._logprobs_of(prompts, completions)] if prompts else []
        if len(logprobs) != len(completions):
            raise ValueError(f"asked for log-probs of {len(completions)} sequences, got {len(logprobs)}")
        for i, (values, completion) in enumerate(zip(logprobs, completions, strict=True)):
            if len(values) != len(completion):
                raise ValueError(
                    f"asked for log-probs of sequence {i}: it has {len(completion)} tokens, got {len(values)}"
                )
        sums = (values[start:].float().sum().cpu() for values, start in zip(logprobs, starts, strict=True))
        scores = list[Tensor]()
        for row in batch.rows:
            if row.answer is None:
                scores.append(torch.full((1 + len(row.spans),), float("nan")))
                continue
            divisor = row.answer.end - row.answer.start if outcome == "mean_logprob" else 1
            scores.append(torch.stack([next(sums) for _ in range(1 + len(row.spans))]) / divisor)
        base, masked = torch.tensor([row[0] for row in scores]), [row[1:] for row in scores]
        drop = [row - own for row, own in zip(masked, base, strict=True)]
        fed, head_rows = sum(map(len, prompts + completions)), sum(map(len, completions))
        return CounterfactualScores(base, masked, drop, ScoringWork(len(completions), fed, fed, head_rows))


def as_access(model: nn.Module | ModelAccess | None) -> ModelAccess:
    """Wrap a module as `Sharded` or `InProcess`, None, for one that is never asked, too; return an access as it is."""
    if model is None or not isinstance(model, nn.Module):
        return InProcess(None) if model is None else model
    return Sharded(model) if is_sharded(model) else InProcess(model)
