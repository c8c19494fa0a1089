"""What each of two processes does where workers of a host, for which these stand, score trees."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cfa_kernels import Batch, CounterfactualConfig, Credit, Span, counterfactual_credit
from cfa_kernels.integrations.workers import Share, Workers, score_share
from cfa_kernels.rows import Rows
from tests.support.log_prob_hosts import batch_rows
from tests.support.plug_ins import RESAMPLING, TOTAL_EFFECTS
from tests.support.sharded import wrapped
from tests.support.tiny import tiny_model, tiny_tokenizer

OPTIONS: list[dict[str, Any]] = [
    {}, {"estimator.outcome": "mean"}, TOTAL_EFFECTS, {**RESAMPLING, "estimator.samples": 2},
    {"estimator.preselect": 0.5, "estimator.preselect_by": "prefix_gain"}, {"estimator": "prefix_gain"},
]  # fmt: skip
ADVANTAGES = torch.tensor([1.0, -0.5, 0.3, 0.7, -1.0, 1.0])


def credit(model: object, options: dict[str, Any], groups: Sequence[int]) -> Credit:
    return counterfactual_credit(
        model, tiny_tokenizer(), batch_rows(), advantages=ADVANTAGES, config=CounterfactualConfig.of(options), seed=3,
        groups=torch.tensor(groups),
    )  # fmt: skip


def as_one_process(
    rank: int, judge: Callable[[Share], Any], tolerance: float = 5e-5, dtype: torch.dtype = torch.float32
) -> None:
    """Credit by two workers is that of one process: uneven groups, a worker with nothing, an error of one worker."""

    def answer(share: Share) -> Any:
        try:
            return judge(share)
        except Exception as error:
            return error

    def ask(shares: list[Share]) -> list[Any]:
        if any(len(share.batch) for share in shares):  # else the workers check their model
            sizes.append([len(share.batch) for share in shares])
        said: list[Any] = [None, None]
        dist.all_gather_object(said, answer(shares[rank]))
        for one in said:
            if isinstance(one, Exception):  # as Ray raises the first
                raise one
        return said

    sizes: list[list[int]] = []
    workers = Workers(ask, 2)
    for options, groups in [({}, [0] * 6), *((options, [0, 0, 0, 0, 1, 2]) for options in OPTIONS)]:
        found, expected = credit(workers, options, groups), credit(tiny_model().eval(), options, groups)
        assert expected.work is not None
        assert any(map(len, expected.drop))
        torch.testing.assert_close(found.drop, expected.drop, atol=tolerance, rtol=0)
        torch.testing.assert_close(found.base, expected.base, atol=tolerance, rtol=0, equal_nan=True)
    assert sizes[0] in ([0, 5], [5, 0])  # of the sixth completion there is no answer
    assert all(min(share) > 0 for share in sizes[1:])
    rows = Rows([torch.tensor([3]), torch.tensor([4])], [torch.tensor([14, 15, 18]), torch.tensor([14, 999, 18])])
    wrong = Batch(rows, units=[[Span(0, 1)]] * 2, answers=[Span(2, 3)] * 2, placeholder=0)
    with pytest.raises(ValueError, match="completions row 1: id 999 at position 1 is outside the vocabulary"):
        workers.score(wrong)
    assert workers.dtype == dtype


def on_a_sharded_model(rank: int) -> None:
    as_one_process(rank, partial(score_share, wrapped(tiny_model().eval(), "FSDP2")))
