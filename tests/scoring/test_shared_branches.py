"""Branches of several rows that begin alike are fed once, in one pack or in many, and score as each row by itself."""

import functools

import numpy as np
import pytest
import torch

from cfa_kernels.batch import Batch
from cfa_kernels.rows import Rows
from cfa_kernels.scoring.branches import branch
from cfa_kernels.scoring.masked import score_batch
from cfa_kernels.scoring.packed import packed_forward
from cfa_kernels.span import Span
from tests.support.models import HYBRIDS, LONGROPE, OTHERS, PLACEHOLDER, float64_throughout, make_model, tokens

pytestmark = pytest.mark.traced  # models in float64 are on the host
WIDTHS, TURN, OBSERVED, ANSWER = (1, 2, 4, 8), 7, 3, 2


def of_two_more(row, k):
    return [11] * (row.spans[k].end - row.spans[k].start + 2)


def of_the_next_row(row, k):
    return row.completion[row.spans[k].start + 1 : row.spans[k].end + 1].tolist()


def forks(*, observed: bool) -> tuple[Rows, list[list[Span]], list[Span]]:
    """Two groups of rollouts that branch off turn by turn, and then half of the turns of each, with what follows."""
    prompts, rows = tokens(9, 5), []
    for seed in (0, 1):
        leaves = [tokens(0)]
        for depth, width in enumerate(WIDTHS):
            drawn = iter(tokens(*[TURN, OBSERVED] * width, seed=10 * depth + seed))
            leaves = [[*own, next(drawn), next(drawn)] for own in leaves for _ in range(width // len(leaves))]
        rows += [torch.cat(own) for own in leaves]
    step = TURN + OBSERVED
    length = TURN + OBSERVED * observed
    spans = [[Span(k * step, k * step + length) for k in range(len(WIDTHS) - 1) if (b + k) % 3] for b in range(16)]
    end = len(rows[0])
    return Rows([prompts[0]] * 8 + [prompts[1]] * 8, rows), spans, [Span(end - ANSWER, end)] * len(rows)


def scored(model, rows, spans, answers, mask, *, continues=False, budget=None, outcome="logprob"):
    batch = Batch(rows, units=spans, answers=answers, token_budget=budget)
    if not continues:
        return score_batch(model, batch, outcome, MASKS[mask])
    return packed_forward(model, rows, keep_states=True).score(batch, mask=MASKS[mask], outcome=outcome)


MASKS = {"id": PLACEHOLDER, "drop": "drop", "two more": of_two_more, "other ids": of_the_next_row}
WAYS = [(False, None), (False, 340), (True, None), (True, 70)]
MODELS = {
    "Qwen3": {}, "Mistral": {}, "Gemma3Text": {}, "DeepseekV3": OTHERS["DeepseekV3"], "Qwen3Moe": {},
    "Phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    "Qwen3Next": HYBRIDS["Qwen3Next"], "Lfm2": HYBRIDS["Lfm2"],
}  # fmt: skip


@functools.cache
def rows_by_themselves(name, mask, observed, outcome):
    """Scores of a model by a call for each row, or for each third one, by the row's place."""
    with float64_throughout(make_model(name, **MODELS[name])) as model:
        rows, spans, answers = forks(observed=observed)
        return {
            b: scored(model, rows.take([b]), [spans[b]], [answers[b]], mask, outcome=outcome)
            for b in range(0, len(rows), 1 if name == "Qwen3" else 3)
        }


def assert_scores_as_rows_by_themselves(name, mask, *, observed=False, outcome="logprob", **way):
    with float64_throughout(make_model(name, **MODELS[name])) as model:
        found = scored(model, *forks(observed=observed), mask, outcome=outcome, **way)
    for b, alone in rows_by_themselves(name, mask, observed, outcome).items():
        torch.testing.assert_close(found.base[b], alone.base[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(found.drop[b], alone.drop[0], rtol=0, atol=2e-6)
    assert torch.cat(found.drop).abs().max() > 0.1
    return found.work


def prefixes(sequences) -> set[tuple[int, ...]]:
    return {tuple(row[:n]) for row in sequences for n in range(1, len(row) + 1)}


@pytest.mark.parametrize(
    ("continues", "budget", "mask", "observed"),  # two masks, "drop" and "two more", with what follows the turns
    [
        (*way, mask, mask in ("drop", "two more"))
        for i, way in enumerate(WAYS)
        for k, mask in enumerate(MASKS)
        if (i + i // 2 + k) % 2 == 0  # each mask with and without a budget, behind rows and not
    ],
)
def test_a_shared_branch_scores_as_each_of_its_rows_and_is_fed_once_but_where_a_pack_begins(
    continues, budget, mask, observed
):
    work = assert_scores_as_rows_by_themselves("Qwen3", mask, observed=observed, continues=continues, budget=budget)
    assert (work.forwards > 2) == (budget is not None)
    rows, spans, answers = forks(observed=observed)
    asked = [
        branch(row, k, MASKS[mask]).tokens[:-1]  # the last target is not fed
        for row in Batch(rows, units=spans, answers=answers).scored_rows
        for k in (None, *range(len(row.spans)))
    ]
    before = prefixes(rows.whole(b)[:-1].tolist() for b in range(len(rows))) if continues else set()
    distinct = len(prefixes(map(np.ndarray.tolist, asked)) - before)
    if budget is None or not continues:  # in several packs behind the same trunk
        assert work.tokens_fed == distinct
    else:  # what a pack begins with may have been fed by the one before; in the order of rows 1.6 times as many are
        assert work.tokens_fed < 1.2 * distinct


@pytest.mark.parametrize(
    ("name", "continues"),  # states go no further, nor do rows whose rotary frequencies their length decides
    [(name, name in ("Mistral", "DeepseekV3", "Phi3", "Lfm2")) for name in MODELS if name != "Qwen3"]
    + [("Phi3", False)],
)
def test_so_it_does_with_windows_latent_attention_experts_lengths_and_states(name, continues):
    assert_scores_as_rows_by_themselves(name, "drop", continues=continues, budget=70 if continues else 340)
