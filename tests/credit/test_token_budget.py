"""A caller's `token_budget` and the configuration's both limit the rows of every forward."""

from contextlib import contextmanager

import pytest
import torch

from cfa_kernels import (
    Batch,
    CounterfactualConfig,
    Rows,
    credited_loss,
)
from cfa_kernels.estimators import gradient
from cfa_kernels.model.head import read_head
from tests.support.tiny import PHRASES, WORDS, tiny_model, tiny_tokenizer

BUDGET = 48
MASKING = {"estimator": "masking", "spans.max_spans": 8}


def rows(**options) -> Rows:
    """Two completions of eight steps and an answer for each of three prompts: 25 packed rows a prompt."""
    steps = torch.randint(4, (6, 8), generator=torch.Generator().manual_seed(0)) + len(WORDS)
    answer = torch.tensor([len(WORDS) + PHRASES.index("#### 7"), 1])
    prompts = [torch.tensor([3, 4, 5, 6 + b // 2, 8]) for b in range(6)]
    return Rows(prompts, [torch.cat([row, answer]) for row in steps], **options)


ROWS, ADVANTAGES = rows(), torch.tensor([1.0, -1.0] * 3)


@pytest.fixture(autouse=True)
def never_checked(monkeypatch, unchecked):
    monkeypatch.setattr(gradient, "check_supported", lambda walk: read_head(walk.model))


@contextmanager
def counted(model):
    """List the rows of each forward inside."""
    sizes = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, args: sizes.append(args[0].numel()))
    yield sizes
    hook.remove()


WAYS = {  # the caller's budget, the batch's, the configuration's
    "none": (None, None, None), "caller": (BUDGET, None, None), "batch": (None, BUDGET, None),
    "configuration": (None, None, BUDGET), "caller, less": (BUDGET, 999, 999), "batch, less": (999, BUDGET, 999),
    "configuration, less": (999, 999, BUDGET),
}  # fmt: skip
CREDIT = [
    MASKING, MASKING | {"estimator.preselect": 0.9, "estimator.preselect_by": "gradient"}, {"estimator": "prefix_gain"},
    {"estimator": "gradient"}, {"estimator": "entropy"},
]  # fmt: skip


PAIRS = [(options, way) for i, options in enumerate(CREDIT) for k, way in enumerate(WAYS) if i == 0 or (i + k) % 2]


@pytest.mark.parametrize(("options", "way"), PAIRS, ids=str)
def test_the_forwards_of_credit_and_loss_have_at_most_the_rows_of_the_smaller_budget(options, way):
    model, (caller, own, config) = tiny_model().eval(), WAYS[way]
    batch = Batch(ROWS, advantages=ADVANTAGES, token_budget=own)
    credit = CounterfactualConfig.of({**options, "token_budget": config})
    with counted(model) as fed:
        credited_loss(model, tiny_tokenizer(), batch, credit=credit, token_budget=caller)
    if way == "none":
        assert max(fed) > BUDGET
    elif way.startswith("configuration"):  # which is of credit's own forwards: the loss has the first
        assert max(fed[1:], default=0) <= BUDGET < fed[0]
    else:
        assert max(fed) <= BUDGET
