"""A cache of fixed size: the same completions, and shapes that repeat."""

import pytest
import torch

from cfa_kernels.hf.model import causal_lm
from tests.support.adapted import PROMPTS, SAMPLED, tiny, tokenizer
from trainer.rollouts import TransformersEngine
from trainer.rollouts.in_process import static_cache_obstacle

WINDOWED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


@pytest.mark.parametrize("options", [{}, WINDOWED], ids=["full attention", "one layer with a window"])
def test_a_cache_of_fixed_size_gives_the_same_completions_call_after_call(options) -> None:
    model = tiny(**options)
    engines = [TransformersEngine(model, tokenizer(), static=static) for static in (False, True)]
    for prompts in (PROMPTS, PROMPTS[:2], [PROMPTS[1] * 4, *PROMPTS[:2]]):
        sampled = SAMPLED | {"keys": SAMPLED["keys"][: len(prompts)]}
        dynamic, static = (engine(prompts, **sampled) for engine in engines)
        assert torch.equal(dynamic.completion_ids, static.completion_ids)
        assert torch.equal(dynamic.prompt_ids, static.prompt_ids)
        torch.testing.assert_close(dynamic.logprobs, static.logprobs, rtol=1e-6, atol=1e-6)
        greedy = {"max_completion_length": 6}
        assert engines[0](prompts, **greedy).texts == engines[1](prompts, **greedy).texts


@pytest.mark.parametrize("options", [{}, WINDOWED], ids=["full attention", "one layer with a window"])
def test_prompts_that_repeat_are_fed_once_and_their_completions_stay_the_same(options) -> None:
    model, shapes = tiny(**options), []
    model.model.register_forward_pre_hook(
        lambda _, __, inputs: shapes.append(inputs["input_ids"].shape), with_kwargs=True
    )
    engine, long, sampled = TransformersEngine(model, tokenizer()), PROMPTS[1] * 3, SAMPLED.copy()
    sampled["max_completion_length"] = 4
    for prompts in ([long, PROMPTS[0], long, PROMPTS[2]], [PROMPTS[2], PROMPTS[2]]):
        keys = [(3, i) for i in range(len(prompts))]
        shapes.clear()
        together = engine(prompts, **sampled | {"keys": keys})
        assert shapes[:2] == ([(3, len(long) - 1), (4, 1)] if long in prompts else [(2, 1), (2, 1)])
        for b, (prompt, key) in enumerate(zip(prompts, keys, strict=True)):
            single = engine([prompt], **sampled | {"keys": [key]})
            assert together.texts[b] == single.texts[0]
            logprobs = together.logprobs[b, : single.logprobs.shape[1]]
            torch.testing.assert_close(logprobs, single.logprobs[0], rtol=1e-6, atol=1e-6)


def test_the_cache_stays_where_it_was_while_shapes_repeat() -> None:
    engine = TransformersEngine(tiny(), tokenizer(), static=True)
    engine(PROMPTS, **SAMPLED)
    first = engine._cache.layers[0].keys
    assert first.shape[0::2] == (8, 64)  # rows and tokens
    engine(PROMPTS[:1], max_completion_length=20)
    assert engine._cache.layers[0].keys is first
    engine(PROMPTS, max_completion_length=70)
    assert engine._cache.layers[0].keys.shape[0::2] == (8, 128)


def test_a_model_that_cannot_decode_with_it_is_named() -> None:
    hybrid, eager = tiny(), tiny()
    hybrid.config.layer_types = ["full_attention", "linear_attention"]
    eager._can_compile_fullgraph = False
    for model, message in ((hybrid, "linear_attention"), (eager, "cannot compile a decoding step of Qwen3ForCausalLM")):
        assert message in static_cache_obstacle(causal_lm(model))
        (note,) = TransformersEngine(model, tokenizer(), static=True).notes
        assert note.startswith("sampling with a cache that grows, for ")
        assert message in note
    assert TransformersEngine(eager, tokenizer()).notes == []  # on a CPU
