"""Llama 4 scales queries by a row's place in a long forward: what is scored stays in shorter ones, or is refused."""

import functools

import pytest
import torch

from cfa_kernels import Batch, Span
from cfa_kernels.model import tree_forward
from cfa_kernels.model.limits import largest_forward
from cfa_kernels.rows import Rows
from cfa_kernels.scoring import packed
from cfa_kernels.scoring.masked import score_batch
from cfa_kernels.scoring.packed import packed_forward
from tests.support.models import MASKED, PLACEHOLDER, make_model, tokens

MOST = 63  # rows of a forward in which places do not matter
LENGTHS = [(20, 20), (50,), (30, 24), (9,)]  # of completions, by prompt
PROMPTS = tokens(6, 8, 7, 5, seed=1)
ROWS = Rows(
    [prompt for prompt, lengths in zip(PROMPTS, LENGTHS, strict=True) for _ in lengths],
    tokens(*[n for lengths in LENGTHS for n in lengths], seed=2),
)
SPANS = [[Span(8 * k, 8 * k + 2) for k in range(n // 8)] for n in ROWS.lengths]
ANSWERS = [Span(n - 4, n - 1) for n in ROWS.lengths]
BATCH = Batch(ROWS, units=SPANS, answers=ANSWERS)


def of_two_more(row, k):
    return [PLACEHOLDER] * (row.spans[k].end - row.spans[k].start + 2)


@functools.cache
def llama(scale: int):
    """The same weights whatever the number of rows from which on places matter."""
    changes = {"floor_scale": scale, "attn_temperature_tuning": True}
    return make_model("Llama4Text", **MASKED["Llama4Text"] | changes)


@functools.cache
def scores_without_the_limit(mask, outcome):
    return score_batch(llama(8192), BATCH, outcome, mask)


@pytest.fixture
def sizes(monkeypatch, unchecked):
    """Rows of each forward of a limited model with those that it continues, and the number of those that it feeds."""
    found, run = [], tree_forward.packed_hidden

    def counted(walk, pack, **options):
        if largest_forward(walk) == MOST:
            found.append((pack.table.num_rows, pack.num_tokens))
        return run(walk, pack, **options)

    for module in (packed, tree_forward):
        monkeypatch.setattr(module, "packed_hidden", counted)
    monkeypatch.setattr("cfa_kernels.scoring.masked.packed_hidden", counted)
    return found


@pytest.mark.parametrize(
    ("continues", "budget", "mask", "outcome"),  # each mask with and without a budget, behind rows and not
    [
        (True, None, of_two_more, "logprob"), (True, 25, "drop", "last"), (False, None, PLACEHOLDER, "logprob"),
        (False, 25, of_two_more, "last"),
    ],
)  # fmt: skip
def test_scores_are_those_of_a_model_without_the_limit(continues, budget, outcome, mask, sizes):
    model, batch = llama(MOST + 1), BATCH.with_columns(token_budget=budget)
    if continues:
        forward = packed_forward(model, ROWS, keep_states=True, token_budget=budget)
        limited = forward.score(batch, mask=mask, outcome=outcome)
    else:
        limited = score_batch(model, batch, outcome, mask)
    free = scores_without_the_limit(mask, outcome)
    torch.testing.assert_close(limited.base, free.base, rtol=0, atol=2e-5)
    torch.testing.assert_close(limited.drop, free.drop, rtol=0, atol=4e-5)
    assert MOST - 10 < max(sizes)[0] <= MOST
    assert any(fed < rows for rows, fed in sizes)  # what fits behind rows is not fed with them once more


@pytest.mark.parametrize("continues", [True, False])
def test_a_masked_row_that_is_longer_is_refused_by_number_before_anything_runs(continues, sizes):
    model = llama(MOST + 1)
    access = packed_forward(model, ROWS, keep_states=True) if continues else None
    before = len(sizes)
    masks = {"mask": lambda row, k: [PLACEHOLDER] * (30 if len(row.completion) == 50 else 2)}
    expected = (
        r"completions row 2: a sequence of 84 tokens .* Llama4ForCausalLM scales queries by their place in a forward "
        f"of more than {MOST} rows"
    )
    with pytest.raises(NotImplementedError, match=expected):
        access.score(BATCH, **masks) if access else score_batch(model, BATCH, **masks)
    assert len(sizes) == before
