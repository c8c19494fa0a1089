"""Attention while decoding: the numbers of transformers' sdpa, from keys and values that are read once."""

import pytest
import torch
from transformers import StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from cfa_kernels.model import decode_attention
from cfa_kernels.model.decode_attention import cache_argument, decoding_attention
from tests.support.adapted import tiny

KEY_HEADS = 2


def problem(queries: int, mask_heads: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k = torch.randn(3, 6, queries, 8, dtype=torch.float64), torch.randn(3, KEY_HEADS, 11, 8, dtype=torch.float64)
    mask = torch.rand(3, mask_heads, queries, 11) < 0.7
    return [q, k, torch.randn(3, KEY_HEADS, 11, 5, dtype=torch.float64), mask.index_fill_(3, torch.tensor(0), True)]


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("mask_heads", [0, 1, 6])
def test_results_are_those_of_sdpa(queries, mask_heads) -> None:
    q, k, v, mask = problem(queries, max(mask_heads, 1))
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 3, True
    ours, theirs = (
        attend(module, q, k, v, mask if mask_heads else None, scaling=0.3)[0]
        for attend in (decode_attention._attention, sdpa_attention_forward)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.traced
def test_the_graph_of_a_decoding_step_has_the_models_key_heads_and_its_logits() -> None:
    model, heads = tiny(), []

    def backend(graph, _):
        calls = [node for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
        heads.extend(node.args[1].meta["example_value"].shape[1] for node in calls)
        return graph.forward

    def logits(step):
        cache = {cache_argument(model): StaticCache(config=model.config, max_cache_len=16)}
        model(input_ids=torch.tensor([[3, 4], [5, 6]]), **cache)
        return step(input_ids=torch.tensor([[7], [8]]), **cache).logits

    with torch.no_grad():
        expected = logits(model)
        with decoding_attention(model):
            captured = logits(torch.compile(model.forward, backend=backend, fullgraph=True))
    assert heads == [model.config.num_key_value_heads] * model.config.num_hidden_layers
    torch.testing.assert_close(captured, expected, rtol=0, atol=1e-10)
