"""Access a model: in this process or by a host's log-prob service; `PackedForward` is the third way."""

from collections.abc import Callable, Sequence, Sized
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..batch import Batch, Masks
from ..model.parts import causal_lm, input_device
from ..model.quantised import product_dtype
from ..model.run_inside import is_sharded, run_inside
from ..model.walk import ModelWalk
from ..options import as_numbers
from ..rows import check_finite
from ..tree.prefix_tree import Query
from .branches import checked_mask
from .masked import CounterfactualScores, ScoringWork, collect_scores, query_logprobs, score_batch
from .outcomes import DIVERGENCES, Outcome
from .plan import queries_of

_Result = TypeVar("_Result")

LogprobsOf = Callable[[list[Tensor], list[Tensor]], Sequence[Tensor | Sequence[float]]]
"""Function from prompts and completions, lists of 1-D int64 tensors, to log-probs (nats) of each completion, 1-D."""

LOGPROBS = "logprobs"
DISTRIBUTIONS = "distributions"
MODEL = "model"
GRADIENTS = "gradients"
WHOLE = "whole"
CAPABILITIES = {
    LOGPROBS: "log-probs of given tokens",
    DISTRIBUTIONS: "distributions over the vocabulary, not only log-probs of given tokens",
    MODEL: "the model itself in this process",
    GRADIENTS: "gradients through the model itself, whole in this process",
    WHOLE: "the model's weights, whole in this process",
}
"""Capabilities of a `ModelAccess`, each with its description for errors."""

_EVERYTHING = frozenset(CAPABILITIES)


class ModelAccess:
    """Way to query a model."""

    capabilities: frozenset[str]  # names of `CAPABILITIES`
    module: nn.Module | None  # as the caller has it, perhaps wrapped; None where it is in another process

    @property
    def model(self) -> PreTrainedModel:
        """Return the model itself, as `causal_lm` finds it; needs the capability `model`."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that the model computes in; `ACCURACY` says how exact its scores are."""
        raise NotImplementedError

    def run(self, body: Callable[[], _Result]) -> _Result:
        """Run `body`, which queries the model, perhaps several times; processes that share a model all call this."""
        return body()

    def apply(self, estimator: Callable[[Any, Batch], Any], batch: Batch) -> Any:
        """Call an estimator that queries the model, `estimator(access, batch)`, in the model's process."""
        return estimator(self, batch)

    def score(
        self, batch: Batch, *, mask: Masks = None, outcome: Outcome = "logprob", merge_adapters: bool = False
    ) -> CounterfactualScores:
        """Score the answers of a batch as sampled and with each unit masked, by default by its placeholder."""
        return self.run(lambda: score_batch(self.model, batch, outcome, mask, merge_adapters))

    def query(self, bundles: Sequence[Sequence[Query]], **options: Any) -> tuple[list[list[Tensor]], ScoringWork]:
        """Answer queries as `query_logprobs` does; needs the capability `model`."""
        return query_logprobs(self.model, bundles, **options)


class InProcess(ModelAccess):
    """Access to a model whose weights are whole in this process, bare or wrapped as in `score_counterfactuals`."""

    capabilities = _EVERYTHING
    _walk: ModelWalk | None = None  # if the model has been walked over

    def __init__(self, module: nn.Module | None) -> None:
        self.module = module

    @property
    def model(self) -> PreTrainedModel:
        """Return the causal model inside its wrappers."""
        if self.module is None:
            raise ValueError("model: must be given to an estimator that queries it, got None")
        return causal_lm(self.module)

    @property
    def dtype(self) -> torch.dtype:
        """Return that of the weights, of autocast where it is on, or of quantised layers."""
        if self.module is None:
            return torch.float32
        device = input_device(self.model).type
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return product_dtype(self._walk or self.model)


class Sharded(InProcess):
    """Access to a model in pieces on several processes (FSDP, ZeRO-3), given as its outermost module.

    Every process queries it in the same order, each for its own completions or for none, inside `run`.
    """

    # Without gradients: torch's FSDP knows one backward for each call of the outermost module, after it. Any backward
    # gives back the outermost module's own weights, which the rest of its call reads. DeepSpeed's engine counts a
    # backward as a step's.
    capabilities = _EVERYTHING - {GRADIENTS, WHOLE}

    def run(self, body: Callable[[], _Result]) -> _Result:
        """Run `body()` inside one call of the outermost module; raise on all processes what one of them raises."""
        assert self.module is not None
        return run_inside(self.module, body)


class RemoteAccess(ModelAccess):
    """Access to a model in other processes, which offers a part of the capabilities; errors say what it `offers`."""

    module: nn.Module | None = None
    dtype: torch.dtype = torch.float32  # type: ignore[assignment]
    offers: str

    @property
    def model(self) -> PreTrainedModel:
        """Raise: the model is in other processes."""
        raise NotImplementedError(f"model: it is in other processes, and {self.offers}")


class LogprobService(RemoteAccess):
    """Access through a host's own log-prob service, for models that are spread over other processes.

    All sequences, cut after the answer, go out in one request. Scores are at the service's temperature.

    Args:
        logprobs_of: the service: from prompts and completions, 1-D int64 each, to a tensor or list of as many log-probs
            as each completion has tokens.
        dtype: in which the service computes.
    """

    capabilities = frozenset({LOGPROBS})
    offers = "only log-probs of whole completions can be requested"

    def __init__(self, logprobs_of: LogprobsOf, *, dtype: torch.dtype = torch.float32) -> None:
        self._logprobs_of, self.dtype = logprobs_of, dtype

    def score(
        self, batch: Batch, *, mask: Masks = None, outcome: Outcome = "logprob", merge_adapters: bool = False
    ) -> CounterfactualScores:
        """Request log-probs of each sequence; scores are on the host."""
        if outcome in DIVERGENCES:
            raise NotImplementedError(f"outcome={outcome!r} needs {CAPABILITIES[DISTRIBUTIONS]}")
        if merge_adapters:
            raise NotImplementedError(f"merge_adapters=True needs {CAPABILITIES[WHOLE]}")
        rule = checked_mask(mask, batch)
        queries = [(row, query) for row in batch.scored_rows for query in queries_of(row, outcome, rule)]
        prompts = [torch.from_numpy(row.prompt) for row, _ in queries]
        completions = [torch.from_numpy(np.append(q.tokens[len(row.prompt) :], q.targets[-1])) for row, q in queries]
        result = self._logprobs_of(prompts, completions) if prompts else []
        got = len(result) if isinstance(result, Sized) else type(result).__name__
        if got != len(completions):
            raise ValueError(f"logprobs_of: expected log-probs of {len(completions)} sequences, got {got}")
        values = [torch.zeros(0)]
        for i, (row, completion, (_, query)) in enumerate(zip(result, completions, queries, strict=True)):
            numbers = as_numbers(row, f"logprobs_of, sequence {i}", tokens := f"the {len(completion)} tokens")
            if len(numbers) != len(completion):
                raise ValueError(f"logprobs_of: expected log-probs of {tokens} of sequence {i}, got {len(numbers)}")
            values.append(numbers[-len(query.targets) :])
        check_finite("logprobs_of,", [row.index for row, _ in queries], values[1:], of="answer token")
        fed = sum(map(len, prompts + completions))
        sizes, work = [query.num_values for _, query in queries], ScoringWork(len(completions), fed, fed)
        return collect_scores(torch.cat(values), sizes, batch, outcome, work)


def as_access(model: nn.Module | ModelAccess | None) -> ModelAccess:
    """Wrap a module as `Sharded` or `InProcess`; None is a model that is never queried, an access stays as it is."""
    if model is None or not isinstance(model, nn.Module):
        return InProcess(None) if model is None else model
    return Sharded(model) if is_sharded(model) else InProcess(model)
