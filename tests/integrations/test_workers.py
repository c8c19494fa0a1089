"""Trees scored by a host's workers: dealt by rows fed, groups whole, results of one process in the batch's order."""

import pickle
import warnings
from itertools import pairwise

import pytest
import torch

from cfa_kernels import Batch, Span
from cfa_kernels.estimators.base import Importances
from cfa_kernels.integrations.workers import Share, Workers, deal_groups, score_share
from cfa_kernels.rows import Rows
from tests.support import sharded, workers
from tests.support.tiny import tiny_model


@pytest.mark.slow
def test_two_workers_that_share_a_model_credit_as_one_process_does():
    sharded.run(2, workers.on_a_sharded_model)


def batch(lengths, prompts, groups=None, *, spans=2) -> Batch:
    """A batch of completions of some lengths; the last token of each is its answer."""
    draw = torch.Generator().manual_seed(0)
    completions = [torch.randint(3, 20, (length,), generator=draw) for length in lengths]
    edges = [torch.linspace(0, length - 1, spans + 1).int().tolist() for length in lengths]
    units = [[Span(*pair) for pair in pairwise(row)] for row in edges]
    answers = [Span(length - 1, length) for length in lengths]
    ids = [torch.tensor(prompt) for prompt in prompts]
    return Batch(Rows(ids, completions), units=units, answers=answers, groups=groups, placeholder=0)


def test_groups_are_dealt_whole_the_heaviest_first():
    given = batch([9, 3, 9, 3, 30, 5], [[3], [4], [3], [4], [5], [6]], spans=1)
    assert deal_groups(given, 2) == [[4], [0, 1, 2, 3, 5]]
    assert deal_groups(given, 7)[5:] == [[], []] or sorted(map(len, deal_groups(given, 7))) == [0, 0, 0, 1, 1, 2, 2]
    together = deal_groups(given.with_columns(groups=[0] * 6), 3)
    assert sorted(map(len, together)) == [0, 0, 6]


def test_every_worker_is_asked_and_results_are_in_the_batchs_order():
    model, asked = tiny_model().eval(), []

    def ask(shares):
        asked.append([share.batch.index for share in shares])
        return [score_share(model, share) for share in shares]

    given = batch([9, 3, 6, 5], [[3], [4], [5], [3]])
    found, expected = Workers(ask, 5).score(given), Workers(ask, 1).score(given)
    assert sorted(map(len, asked[0])) == [0, 0, 1, 1, 2]
    torch.testing.assert_close(found.base, expected.base, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.drop, expected.drop, atol=1e-5, rtol=0)
    assert found.work.tokens_fed == expected.work.tokens_fed


def test_what_is_joined_keeps_what_belongs_to_no_completion():
    def marked(access, some):
        base = torch.tensor(some.index).float()
        return Importances([base[b : b + 1] for b in range(len(some))], base=base, change_of="logprob", details={})

    model, given = tiny_model(), batch([5, 3, 4], [[3], [4], [5]])
    found = Workers(lambda shares: [score_share(model, Share(marked, share.batch)) for share in shares], 2).apply(
        marked, given
    )
    assert found.base.tolist() == [0, 1, 2]
    assert [row.item() for row in found.values] == [0, 1, 2]
    assert (found.change_of, found.work, found.details) == ("logprob", None, None)


def test_a_share_that_cannot_be_written_as_ray_hands_it_over_is_read_without_a_warning():
    parts = list[pickle.PickleBuffer]()
    whole = torch.arange(1000)
    sent = pickle.dumps(Batch(Rows([whole[3:4]], [whole[14:17]])), protocol=5, buffer_callback=parts.append)
    read_only = [bytes(part) for part in parts]
    assert sum(map(len, [sent, *read_only])) < 1000, "the tensors that rows are views of"
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            batch = pickle.loads(sent, buffers=read_only)
            assert [row.tolist() for row in (*batch.rows.prompts, *batch.rows.completions)] == [[3], [14, 15, 16]]
            batch.rows.completions[0].zero_()
    finally:
        torch.set_warn_always(always)
