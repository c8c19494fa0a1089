"""Layers compiled for a token of several rows, in what a CUDA graph would hold: the same completions by few graphs."""

import pytest
import torch

from cfa_kernels.model import decode_attention
from cfa_kernels.model.compiled import CompiledKind
from cfa_kernels.model.parts import causal_lm
from tests.support.adapted import PROMPTS, SAMPLED, adapted, tiny, tokenizer
from trainer.rollouts import decoding
from trainer.rollouts import prompts as prompts_module
from trainer.rollouts.in_process import TransformersEngine

pytestmark = pytest.mark.traced
COMMON, LONG = [*range(30, 50)], PROMPTS[1] * 4
aot_eager = torch._dynamo.lookup_backend("aot_eager")


@pytest.fixture
def captured(monkeypatch):
    """Rows and places of every step that a CUDA graph would hold; without a GPU it is run each time."""
    seen = set()

    def capture(step, pool):
        state, live, *_ = step.args
        seen.add((len(state.token), live))
        return step, None

    monkeypatch.setattr(decoding, "capture", capture)
    torch._dynamo.reset()
    yield seen
    torch._dynamo.reset()


@pytest.mark.parametrize(("least", "most"), [(1000, 1), (4, 2)], ids=["prompts apart", "shared"])
@pytest.mark.parametrize(
    ("make", "dtype"),
    [(tiny, None), (lambda: adapted(tiny()), None), (tiny, torch.float32)],
    ids=["weights", "LoRA", "a copy"],
)
def test_compiled_layers_decode_the_same_by_one_graph_for_each_way_of_sharing(
    make, dtype, least, most, captured, monkeypatch
) -> None:
    monkeypatch.setattr(prompts_module, "SHARED_FROM", least)
    (plain, model), counts = [make() for _ in range(2)], []
    model.load_state_dict(plain.state_dict())
    layers = causal_lm(model).model.layers
    kind = CompiledKind(layers, lambda graph, inputs: counts.append(len(inputs)) or aot_eager(graph, inputs))
    engines = [TransformersEngine(one, tokenizer(), dtype, captured=True) for one in (plain, model)]
    # Lengths, numbers of rows and of groups differ; one group is a graph of its own.
    for prompts, tokens in (([COMMON, PROMPTS[1], LONG] * 4, 70), ([COMMON] * 9, 20), ([COMMON, LONG] * 12, 3)):
        sampled = SAMPLED | {"keys": [(3, i) for i in range(len(prompts))], "max_completion_length": tokens}
        expected, ours = (engine(prompts, **sampled) for engine in engines)
        assert ours.ids() == expected.ids()
        torch.testing.assert_close(ours.logprobs, expected.logprobs, rtol=0, atol=1e-6)
    assert 1 <= len(counts) <= most
    assert kind.decodes
    assert {rows for rows, *_ in captured} >= {16, 32}
    assert len({live for _, live in captured}) > 1


def refused(graph, inputs):
    raise ValueError("no kernel for that")


def doubled(graph, inputs):
    run = aot_eager(graph, inputs)
    return lambda *values: [2 * out if out.is_floating_point() else out for out in run(*values)]


def strict(graph, inputs):
    def run(*values):
        raise AssertionError("expected size 8==8, stride 1024==128")

    return run


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (refused, "BackendCompilerFailed"), (doubled, "a token's results differ by"),
        (strict, "AssertionError: expected size 8==8"),
    ],
)  # fmt: skip
def test_layers_that_do_not_compile_to_the_same_decode_as_they_are(backend, reason, captured, caplog) -> None:
    plain, model = tiny(), tiny()
    CompiledKind(model.model.layers, backend)
    expected, ours = (
        TransformersEngine(m, tokenizer(), captured=True)(
            [COMMON] * 8, **SAMPLED | {"keys": [(3, i) for i in range(8)]}
        )
        for m in (plain, model)
    )
    assert ours.ids() == expected.ids()
    (message,) = (one.message for one in caplog.records if one.levelname == "WARNING")
    assert message.startswith(f"layers of Qwen3DecoderLayer decode as they are, not compiled: {reason}")


def test_layers_that_cannot_share_keys_decode_compiled_without(captured, monkeypatch, caplog) -> None:
    monkeypatch.setattr(prompts_module, "SHARED_FROM", 4)
    monkeypatch.setattr(decode_attention, "_serves", lambda *_: False)
    kind = CompiledKind((model := tiny()).model.layers, aot_eager)
    TransformersEngine(model, tokenizer(), captured=True)(
        [COMMON] * 8, **SAMPLED | {"keys": [(3, i) for i in range(8)]}
    )
    assert kind.decodes
    (message,) = (one.message for one in caplog.records if one.levelname == "WARNING")
    assert "keeps the keys of its whole prompt" in message
