"""The head while a model decodes: the same logits by the library's product, and what is left as it is."""

import pytest
import torch
from torch import nn

from cfa_kernels.model import head as head_module
from cfa_kernels.model.head import decoding_head
from cfa_kernels.ops.matmul import product
from tests.support.adapted import tiny
from tests.support.budget import assert_within_budget


@pytest.fixture
def multiplied(monkeypatch):
    """Shapes of the rows that the head was multiplied with by `product`."""
    shapes: list[torch.Size] = []
    monkeypatch.setattr(head_module, "product", lambda rows, weight: shapes.append(rows.shape) or product(rows, weight))
    return shapes


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_logits_are_those_of_the_layer(bias, multiplied) -> None:
    torch.manual_seed(0)
    model = tiny().float()
    head = model.lm_head = nn.Linear(model.config.hidden_size, 50, bias=bias)
    hidden = torch.randn(3, 2, model.config.hidden_size)
    exact = nn.functional.linear(hidden.double(), head.weight.double(), head.bias.double() if bias else None)
    own = head(hidden)
    with decoding_head(model):
        logits = head(hidden)
    assert multiplied == [(6, hidden.shape[-1])]
    assert_within_budget(logits, own, exact)
    assert "forward" not in vars(head)


def test_other_heads_autocast_and_gradients_are_left_alone(multiplied) -> None:
    model = tiny().float()
    head, hidden = model.lm_head, torch.randn(2, model.config.hidden_size)
    with decoding_head(model):
        head(hidden).sum().backward()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert head(hidden).dtype == torch.bfloat16
    head.forward = own = lambda rows: rows
    with decoding_head(model):
        assert head.forward is own
    model.set_output_embeddings(nn.Sequential(head))
    with decoding_head(model):
        assert "forward" not in vars(model.get_output_embeddings())
    assert not multiplied
