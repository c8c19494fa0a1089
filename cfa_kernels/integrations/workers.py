"""Score completions by a model that a host's workers hold: estimators go to the model, importances come back in order.

The host's main process gives `counterfactual_credit` a `Workers`; each worker calls `score_share` on what it is sent.
Groups are dealt whole, so that every prompt is fed once and completions that are compared stay together. If workers
cannot, the host's log-prob requests take their place.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..batch import Batch, Masks
from ..estimators.base import OwnFunction
from ..model.check.verify import check_supported
from ..rows import Rows, equal_prompts
from ..scoring.access import RemoteAccess, Sharded, as_access
from ..scoring.branches import check_ids
from ..scoring.masked import CounterfactualScores, ScoringWork
from ..scoring.outcomes import Outcome
from ..tree import balance


class Share(NamedTuple):
    """Part of a batch that one worker scores, perhaps of no completions."""

    estimator: Callable[[Any, Batch], Any]
    batch: Batch


def score_share(module: nn.Module, share: Share) -> Any:
    """Run a share's estimator next to the model; workers that hold pieces of one call this together, sharded as it is.

    Returns the estimator's result, on the host; for a share without completions the dtype that the model computes in.
    Raises `NotImplementedError` for a model that cannot be scored in packed trees.
    """
    access, batch = as_access(module), share.batch

    def scored() -> Any:
        check_supported(access.model)  # first: it runs forwards, of all workers alike
        if not len(batch):
            return access.dtype
        check_ids(access.model, batch.scored)
        return _joined([share.estimator(access, batch)], [range(len(batch))])

    with torch.no_grad():
        return access.run(scored)


class Workers(RemoteAccess):
    """Access to a model that `count` workers of a host hold, whole or in pieces; estimators that query it run there.

    `ask` sends each worker its share, perhaps empty, at once, and returns the results of `score_share` in order.
    """

    capabilities = Sharded.capabilities
    offers = "estimators that query the model must run on the workers (`apply`)"

    def __init__(self, ask: Callable[[list[Share]], Sequence[Any]], count: int) -> None:
        self._ask, self.count = ask, count

    @cached_property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Return that of the workers' model, which they check at the first request."""
        return self._ask([Share(_scores, Batch(Rows([], [])))] * self.count)[0]  # type: ignore[no-any-return]

    def apply(self, estimator: Callable[[Any, Batch], Any], batch: Batch) -> Any:
        """Deal the batch's groups over the workers and join the results, in the batch's order."""
        if isinstance(estimator, OwnFunction):  # runs here, with these workers in the model's place
            return estimator(self, batch)
        return self._dealt(estimator, batch)

    def score(
        self, batch: Batch, *, mask: Masks = None, outcome: Outcome = "logprob", merge_adapters: bool = False
    ) -> CounterfactualScores:
        """Score the batch on the workers."""
        scores = partial(_scores, mask=mask, outcome=outcome, merge_adapters=merge_adapters)
        return self._dealt(scores, batch)  # type: ignore[no-any-return]

    def _dealt(self, estimator: Callable[[Any, Batch], Any], batch: Batch) -> Any:
        dealt = deal_groups(batch, self.count)
        answers = self._ask([Share(estimator, batch.take(rows)) for rows in dealt])
        results = [pair for pair in zip(answers, dealt, strict=True) if pair[1]]
        return _joined(*zip(*results, strict=True))


def _scores(access: Any, batch: Batch, **options: Any) -> CounterfactualScores:
    return access.score(batch, **options)  # type: ignore[no-any-return]


def deal_groups(batch: Batch, workers: int) -> list[list[int]]:
    """Deal the groups of a batch over workers by their tokens times units; rows are ascending."""
    groups = equal_prompts(batch.rows.prompts) if batch.groups is None else batch.groups.tolist()
    members: dict[int, list[int]] = {}
    for b, group in enumerate(groups):
        members.setdefault(group, []).append(b)
    own = list(members.values())
    scored = batch.scored_rows
    sizes = [sum(len(scored[b].completion) * (1 + len(scored[b].spans)) for b in group) for group in own]
    return [sorted(b for group in groups for b in own[group]) for groups in balance.deal(sizes, workers)]


def _joined(parts: Sequence[Any], rows: Sequence[Sequence[int]]) -> Any:
    """Join the results of several shares, on the host: columns by their rows, counts of work by adding."""
    first = parts[0]
    if isinstance(first, ScoringWork):
        return sum(parts, ScoringWork())
    if hasattr(first, "__dataclass_fields__"):
        columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(first)}
        return replace(first, **{name: _joined(values, rows) for name, values in columns.items()})
    if isinstance(first, list | Tensor):
        order = torch.tensor([b for own in rows for b in own]).argsort().tolist()
        values = [value.cpu() if isinstance(value, Tensor) else value for part in parts for value in part]
        ordered = [values[i] for i in order]
        return torch.stack(ordered) if isinstance(first, Tensor) else ordered
    return None if isinstance(first, dict) else first  # `details` of shares are no whole
