"""Credit that is kept by row: the same whatever micro-batches it is assigned in, and in whichever host."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cfa_kernels import (
    Batch,
    BatchKeys,
    CounterfactualConfig,
    DeferredCredit,
    Importances,
    Rows,
    packed_forward,
)
from cfa_kernels.integrations import trl_credit
from tests.support.log_prob_hosts import batch_rows
from tests.support.plug_ins import RESAMPLING
from tests.support.tiny import tiny_model, tiny_tokenizer

ROWS, ADVANTAGES = batch_rows(), torch.tensor([1.0, -0.5, 0.3, 0.7, -1.0, 1.0])
BATCH = Batch(ROWS, advantages=ADVANTAGES)
DRAWN = [{"control": "random"}, RESAMPLING, {"estimator": "gradient", "estimator.sigma": 0.1}]


@pytest.mark.parametrize("options", [{}, {"estimator": "prefix_gain"}, *DRAWN], ids=str)
def test_micro_batches_change_neither_weights_nor_draws(options):
    model = tiny_model().eval().double()  # whose rounding moves no draw

    def batch():
        return DeferredCredit(CounterfactualConfig.of(options), tiny_tokenizer(), BATCH, seed=(3, 1, 0))

    whole, parts = batch(), batch()
    whole.by_model(model)
    for part in (torch.tensor([4, 1]), torch.tensor([True, False, True, True, False, True])):
        assert parts.is_due(part)
        assert parts.finished() is None
        parts.by_forward(part, packed_forward(model, ROWS.take(part), keep_states=True))
        assert not parts.is_due(part)
    torch.testing.assert_close(parts.take(range(6)).weights, whole.take(range(6)).weights, rtol=0, atol=1e-4)
    assert parts.finished().spans == whole.finished().spans
    assert parts.finished() is None


def beside_others(model, batch):
    """Importances by the place of a unit, of which each completion's share depends on the batch and its group."""
    lengths = torch.tensor(batch.rows.lengths).float()
    groups = [lengths[batch.groups == group].sum() for group in batch.groups]
    places = [torch.arange(len(units)).float() for units in batch.units]
    return Importances([row * group / lengths.sum() for row, group in zip(places, groups, strict=True)])


COMPARING = [
    {"estimator": "prefix_tree"}, {"estimator": "sibling_edits"}, {"estimator": "entropy"},
    {"weights": "top", "weights.fraction": 0.4},
    {"estimator": "prefix_gain", "weights": "top", "weights.fraction": 0.4, "control": "inverted"},
    {"estimator": beside_others, "weights": "identity", "units": "tokens"},
]  # fmt: skip
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 1.0])
COUNTED = [torch.full((n,), float(b != 3)) for b, n in enumerate(ROWS.lengths)]


def comparing(options, rows=range(6), **given):
    rows, config = list(rows), CounterfactualConfig.of(options)
    columns = {"groups": torch.tensor([0, 0, 0, 1, 1, 1])[rows], "rewards": REWARDS[rows]}
    counted = [COUNTED[b] for b in rows]
    batch = Batch(ROWS.take(rows), advantages=ADVANTAGES[rows], mask=counted, **columns)
    return DeferredCredit(config, tiny_tokenizer(), batch, seed=0, **given)


@pytest.mark.parametrize("options", COMPARING, ids=range(len(COMPARING)))
def test_completions_are_compared_with_the_whole_batch_whatever_forwards_hold_them(options):
    """Row 3 is not counted: it is no forward's, and is a sibling of rows 4 and 5."""
    model = tiny_model().eval().double()
    whole, parts = comparing(options), comparing(options)
    whole.by_model(model)
    assert parts.compares_beyond([[0, 1, 2], [4, 5]])
    for part in ([4, 1], [0, 2, 5]):
        if parts.is_due(part):
            parts.by_forward(part, packed_forward(model, ROWS.take(part), keep_states=True))
    ours, theirs = (one.credited(range(6)) for one in (parts, whole))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert theirs is not whole.batch.advantages, "this credit does nothing"
    assert whole.finished().spans[3] == []
    assert 3 not in whole.to_score


@pytest.mark.parametrize("options", COMPARING, ids=range(len(COMPARING)))
def test_completions_are_compared_with_those_of_other_processes(options):
    model = tiny_model().eval().double()
    whole = comparing(options)
    whole.by_model(model)
    places, met, brought = [[0, 1, 2], [3, 4, 5]], threading.Barrier(2, timeout=60), [None, None]

    def of_process(rank):
        def gather(value):
            brought[rank] = pickle.dumps(value)
            met.wait()
            values = [pickle.loads(one) for one in brought]
            met.wait()
            return values

        own = comparing(options, places[rank], gather=gather)
        assert own.compares_beyond([range(3)])
        own.by_model(copy.deepcopy(model))
        return own.credited(range(3)), own.finished()

    with ThreadPoolExecutor(2) as pool:
        parts = [task.result() for task in [pool.submit(of_process, rank) for rank in (0, 1)]]
    torch.testing.assert_close([row for rows, _ in parts for row in rows], whole.credited(range(6)), rtol=0, atol=1e-6)
    assert [row for _, credit in parts for row in credit.spans] == whole.finished().spans


def test_rows_of_several_processes_need_numbers_of_their_own():
    own = comparing(COMPARING[-1], gather=lambda value: [value, value])
    with pytest.raises(ValueError, match=r"rows: number 0 is of two rows; with gather, Rows\(index=\.\.\.\) must"):
        own.by_model(tiny_model().eval())


@pytest.mark.parametrize("options", DRAWN, ids=str)
def test_a_batch_of_rows_and_trl_draw_alike(options):
    """For one seed, one step and the same rows, of which TRL's second process has the last group."""
    model, config = tiny_model().eval().double(), CounterfactualConfig.of(options)
    ours = DeferredCredit(config, tiny_tokenizer(), BATCH, seed=BatchKeys(7).key(4))
    ours.by_model(model)

    def padded(rows, side):
        ones = [torch.ones_like(row) for row in rows]
        return [torch.nn.utils.rnn.pad_sequence(x, True, padding_side=side) for x in (rows, ones)]

    some = ROWS.take([3, 4, 5])
    columns = [*padded(some.prompts, "left"), *padded(some.completions, "right"), ADVANTAGES[3:]]
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
    trl = trl_credit.batch_credit(
        config, tiny_tokenizer(), dict(zip(names, columns, strict=True)), torch.zeros(3), some.completions, first=3,
        group_size=3, seed=BatchKeys(7).key(4), temperature=1.0,
    )  # fmt: skip
    trl.by_model(model)
    torch.testing.assert_close(trl.take(range(3)).weights, ours.take([3, 4, 5]).weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("normalize", ["mean", None])
@pytest.mark.parametrize("factor", [[0.5] * 5, [0, 0.5, 1, 1, 1]])
def test_weights_that_factors_change_are_normalised_if_weights_are(factor, normalize):
    factor, entropies = torch.tensor(factor), torch.tensor([1.0, 2, 3, 4, 5])
    rows, config = ROWS.take([0]), CounterfactualConfig("entropy", weights="bilevel", normalize=normalize)
    rows = Rows(rows.prompts, [rows.completions[0][:5]])
    plain, own = (
        DeferredCredit(config, tiny_tokenizer(), Batch(rows, entropies=[entropies], **given), seed=0)
        for given in ({}, {"weights": [factor]})
    )
    for one in (plain, own):
        one.by_model(tiny_model().eval())
    product = plain.take([0]).weights[0] * factor
    torch.testing.assert_close(own.take([0]).weights[0], product / (product.mean() if normalize else 1))


def test_what_a_tool_wrote_decides_neither_which_rows_are_scored_nor_the_mean_of_weights():
    """Nor is signed credit normalised where a caller's weights take tokens away."""
    counted = [torch.arange(n) > 0 for n in ROWS.lengths]
    advantages = [torch.where(mask, value, 5.0) for mask, value in zip(counted, ADVANTAGES, strict=True)]
    positive = CounterfactualConfig(completions="positive")
    batch = Batch(ROWS, advantages=advantages, mask=counted)
    assert DeferredCredit(positive, tiny_tokenizer(), batch, seed=0).to_score == [0, 2, 3, 5]
    model = tiny_model().eval()
    weights = [(torch.arange(n) != 2).float() for n in ROWS.lengths]
    own = [torch.where(mask, value, 0.0) for mask, value in zip(counted, ADVANTAGES, strict=True)]
    credit = DeferredCredit(
        CounterfactualConfig(normalize="mean"), tiny_tokenizer(), Batch(ROWS, advantages=own, weights=weights), seed=0
    )
    credit.by_model(model)
    for row, mask in zip(credit.take(range(6)).weights, counted, strict=True):
        assert row[mask].mean() == pytest.approx(1.0, abs=1e-5)
        assert (row[~mask] == 1).all()


def test_credit_of_a_batch_without_advantages_gives_weights_and_no_advantages():
    credit = DeferredCredit(CounterfactualConfig(), tiny_tokenizer(), Batch(ROWS), seed=0)
    credit.by_model(tiny_model().eval())
    columns = credit.columns([2, 0])
    assert columns["advantages"] is None
    torch.testing.assert_close(columns["weights"], [credit.take(range(6)).weights[b] for b in (2, 0)])
