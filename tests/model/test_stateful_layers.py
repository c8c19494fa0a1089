"""Layers with a state on a packed tree: log-probs and gradients of plain forwards, whatever lengths the pieces have."""

from typing import Any
from unittest.mock import ANY

import pytest
import torch

from cfa_kernels import check_model, packed_logprobs
from cfa_kernels.model import stateful_layers
from cfa_kernels.model.walk import ModelWalk
from cfa_kernels.rows import Rows
from tests.support.models import HYBRIDS, assert_same_gradients, gradients, make_model, plain_logprobs, tokens

PROMPT, OTHER, LONG, MORE, LESS = tokens(5, 1, 7, 5, 3, seed=5)
END, LAST = tokens(1, 1, seed=6)
COMPLETIONS = {
    "pieces of one token, one after the other": (
        [PROMPT] * 4,
        [LONG, torch.cat([LONG[:1], MORE]), torch.cat([LONG[:2], LESS]), torch.cat([LONG[:3], END, LAST])],
    ),
    "equal": ([PROMPT], [LONG]),
    "prefixes of another": ([PROMPT] * 2, [LONG[:4], LONG[:2]]),
    "a piece of one token that nothing follows": ([PROMPT], [torch.cat([END, LAST])]),
    "of one token": ([PROMPT] * 2, [END, LAST]),
    "after a prompt of one token": ([OTHER] * 3, [LONG, torch.cat([LONG[:1], MORE]), END]),
    "after a prompt that another row begins with": ([torch.cat([PROMPT, LONG[:2]])], [MORE]),
}
BATCH = tuple([row for kind in COMPLETIONS.values() for row in kind[side]] for side in (0, 1))


GENERATOR = torch.Generator().manual_seed(0)
FACTORS = [torch.empty(len(row)).uniform_(-1, 1, generator=GENERATOR) for row in BATCH[1]]  # of each log-prob


@pytest.mark.parametrize(
    ("name", "training"), [*((name, False) for name in HYBRIDS), ("Qwen3Next", True), ("Bamba", True)]
)
def test_pieces_of_one_token_train_as_plain_forwards_do(name, training):
    model = make_model(name, **HYBRIDS[name]).train(training)
    ours, theirs = packed_logprobs(model, Rows(*BATCH)), plain_logprobs(model, *BATCH)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-4)
    ours, expected = (
        gradients(model, sum((row * factor.to(row)).sum() for row, factor in zip(rows, FACTORS, strict=True)))
        for rows in (ours, theirs)
    )
    assert_same_gradients(ours, expected, 1e-3)


@pytest.mark.parametrize(("name", "reentrant"), [("Qwen3_5Text", True), ("Bamba", False)])
@pytest.mark.traced  # checkpoints compare devices, which the stand-in names otherwise
def test_checkpointed_layers_find_their_states_again(name, reentrant):
    model = make_model(name, **HYBRIDS[name]).train()

    def by_packed_rows():
        model.zero_grad()
        rows = packed_logprobs(model, Rows(*BATCH))
        return gradients(model, sum((row * factor.to(row)).sum() for row, factor in zip(rows, FACTORS, strict=True)))

    expected = by_packed_rows()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    check_model(model)
    assert_same_gradients(by_packed_rows(), expected, 1e-5)


@pytest.mark.parametrize("taken", ["cache", "cache_params", "past_key_values"])  # transformers 5.24 has the first
def test_a_cell_is_found_by_any_name_that_transformers_gave_the_argument_of_its_state(taken):
    named: dict[str, Any] = {}
    exec(f"def forward(self, rows, {taken}=None):\n return {taken}.update_recurrent_state(rows, 0)", named)
    cell = type("Cell", (torch.nn.Module,), {"forward": named["forward"]})
    assert stateful_layers._cells(ModelWalk(torch.nn.ModuleList([cell()]))) == [(ANY, taken)]
