"""Our own decoding: the completions of transformers' `generate`, in steps that a CUDA graph can hold."""

import copy
import functools
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, DiffLlamaConfig, FalconConfig, Llama4TextConfig

from cfa_kernels.model import decode_attention
from tests.support.adapted import PROMPTS, SAMPLED, tiny, tokenizer
from tests.support.operator_calls import OperatorCalls
from tests.support.waits import a_device, put_on_device
from trainer.rollouts import decoding
from trainer.rollouts import prompts as prompts_module
from trainer.rollouts.in_process import TransformersEngine, by_transformers
from trainer.rollouts.sampling import CANDIDATES

WINDOWED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
MODELS = pytest.mark.parametrize("options", [{}, WINDOWED], ids=["full attention", "one layer with a window"])
LONG, GREEDY = PROMPTS[1] * 4, {"max_completion_length": 6}
ONE_LAYER = functools.partial(tiny, num_hidden_layers=1)


@pytest.fixture
def replays(monkeypatch):
    """Rows, places, candidates and operators of every replay; without a GPU a graph is the step that it would hold."""
    seen, record = [], decoding.capture

    def capture(step, pool):
        state, live, _, candidates = step.args
        replay, pool = record(step, pool) if torch.cuda.is_available() and state.token.is_cuda else (step, None)

        def replayed() -> None:
            with OperatorCalls() as inside:
                replay()
            seen.append((len(state.token), live, candidates, len(inside.calls)))

        return replayed, pool

    monkeypatch.setattr(decoding, "capture", capture)
    return seen


def by_generate(model, prompts, **options):
    engine = TransformersEngine(model, tokenizer())
    engine._decode = functools.partial(by_transformers, model)
    return engine(prompts, **options)


def ending(**options):
    """A model whose completions mostly end, within and between the looks at them."""
    model = tiny(**options)
    model.generation_config.eos_token_id = [*range(0, 512, 6)]
    return model


@functools.cache
def on_the_host(windowed: bool) -> list[tuple]:
    """Prompts, how they are sampled, what transformers samples then, and what it gives greedily."""
    model, result = ending(**WINDOWED if windowed else {}), []
    for prompts in (PROMPTS, PROMPTS[:2], [LONG, *PROMPTS[:2]], [PROMPTS[2], PROMPTS[2]]):
        sampled = SAMPLED | {"keys": SAMPLED["keys"][: len(prompts)], "max_completion_length": 40}
        greedy = by_generate(model, prompts, **GREEDY).texts
        result.append((prompts, sampled, by_generate(model, prompts, **sampled), greedy))
    return result


@pytest.mark.parametrize(("options", "how"), [(WINDOWED, "captured"), ({}, "step by step"), ({}, "by transformers")])
def test_completions_on_a_gpu_are_those_of_transformers_on_the_host(options, how, replays, device) -> None:
    model = ending(**options).to(device)
    engine = TransformersEngine(model, tokenizer(), captured=how == "captured")
    if how == "by transformers":
        engine = functools.partial(by_generate, model)
    for prompts, sampled, theirs, greedy in on_the_host(bool(options)):
        ours = engine(prompts, **sampled)
        assert ours.texts == theirs.texts
        assert not theirs.truncated.any()
        assert ours.ids() == theirs.ids()
        torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-5)
        for own, other, row in zip(ours.kept_tokens, theirs.kept_tokens, theirs.ids(), strict=True):
            assert torch.equal(own.offsets, other.offsets)
            pairs = zip(own.ids.split(own.counts.tolist()), other.ids.split(own.counts.tolist()), row, strict=True)
            assert all({*a.tolist()} == {*b.tolist()} >= {token} for a, b, token in pairs)
        assert engine(prompts, **GREEDY).texts == greedy
    assert bool(replays) == (how == "captured")


@MODELS
def test_prompts_that_repeat_are_fed_once_and_their_completions_stay_the_same(options) -> None:
    model, shapes = tiny(**options), []
    model.model.register_forward_pre_hook(
        lambda _, __, inputs: shapes.append(inputs["input_ids"].shape), with_kwargs=True
    )
    engine, sampled = TransformersEngine(model, tokenizer()), SAMPLED | {"max_completion_length": 4}
    for prompts, fed in (([LONG, PROMPTS[0], LONG, PROMPTS[2]], [(3, 19), (4, 1)]), ([[5], [5]], [(1, 1), (2, 1)])):
        keys = [(3, i) for i in range(len(prompts))]
        shapes.clear()
        together = engine(prompts, **sampled | {"keys": keys})
        assert shapes[:2] == fed
        for b, (prompt, key) in enumerate(zip(prompts, keys, strict=True)):
            single = engine([prompt], **sampled | {"keys": [key]})
            assert together.texts[b] == single.texts[0]
            torch.testing.assert_close(together.logprobs[b], single.logprobs[0], rtol=1e-6, atol=1e-5)


HEADS = pytest.mark.parametrize("heads", [2, 4], ids=["grouped heads", "one key head each"])
COMMON = [*range(30, 50)]


@HEADS
@pytest.mark.parametrize("captured", [False, True])
def test_rows_behind_a_shared_prompt_are_those_behind_prompts_of_their_own(
    heads, captured, replays, monkeypatch
) -> None:
    model, shapes = tiny(num_key_value_heads=heads), []
    model.generation_config.eos_token_id = [*range(0, 512, 16)]
    model.register_forward_pre_hook(lambda *_: shapes.append(decoder._shared.shape))
    prompts = [PROMPTS[2] + COMMON, PROMPTS[1], COMMON, PROMPTS[1], LONG] * 4 + [PROMPTS[1]] * 2
    sampled = SAMPLED | {"keys": [(3, i) for i in range(22)], "max_completion_length": 70}
    decoder = TransformersEngine(model, tokenizer())._decode
    expected = by_generate(model, prompts, **sampled)
    for least, groups in ((1000, 0), (4, 4)):
        monkeypatch.setattr(prompts_module, "SHARED_FROM", least)
        engine = TransformersEngine(model, tokenizer(), captured=captured)
        decoder = engine._decode
        shapes.clear()
        ours = engine(prompts, **sampled)
        assert ours.ids() == expected.ids()
        torch.testing.assert_close(ours.logprobs, expected.logprobs, rtol=0, atol=1e-5)
        assert shapes[0][1] == groups
    assert shapes[0][2:] == ((14, 64) if captured else (10, 20))
    left = [shape[:3] for shape in shapes]
    assert left == sorted(left, reverse=True)
    assert left[-1] == ((8, 4, 14) if captured else (1, 4, 1))
    assert engine([[*prompt, 3] for prompt in prompts[:3]], **GREEDY).texts  # nothing to share


@pytest.mark.parametrize("rows", [{3: 4}, {0: 2, 1: 2, 5: 1}, {i: 1 for i in range(4)}], ids=["one", "three", "four"])
@pytest.mark.parametrize("options", [{}, WINDOWED, {"num_key_value_heads": 4}], ids=["grouped heads", "window", "each"])
def test_a_beginning_that_all_prompts_share_is_fed_and_kept_once(options, rows, monkeypatch, caplog) -> None:
    model, tokens = tiny(**options), []
    prompts = [[*COMMON, 60 + i, *range(70, 70 + i)] for i, count in rows.items() for _ in range(count)]
    sampled = SAMPLED | {"keys": [(3, i) for i in range(len(prompts))]}
    expected = by_generate(model, prompts, **sampled)
    monkeypatch.setattr(prompts_module, "SHARED_FROM", len(COMMON))
    model.model.register_forward_pre_hook(
        lambda _, __, inputs: tokens.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    engine = TransformersEngine(model, tokenizer())
    for _ in range(2):
        tokens.clear()
        ours = engine(prompts, **sampled)
        assert ours.ids() == expected.ids()
        torch.testing.assert_close(ours.logprobs, expected.logprobs, rtol=0, atol=1e-5)
        assert tokens[0] == len(COMMON) + sum(rows)  # what is before the last token
    assert engine._decode._shared.shape[1::2] == ((0, 0) if options == WINDOWED else (1, 23 if len(rows) == 1 else 20))
    kept = "each completion keeps the keys of its whole prompt: Qwen3ForCausalLM has layers that attend in a window"
    assert caplog.messages == [kept] * (options == WINDOWED)


def test_room_for_what_rows_share_is_the_most_places_of_a_call(monkeypatch) -> None:
    monkeypatch.setattr(prompts_module, "SHARED_FROM", 4)
    model, groups = tiny(), [[*range(10 * i + 3, 10 * i + 9)] for i in range(4)]
    decoder = TransformersEngine(model, tokenizer())
    for prompts in ([*groups, *groups], [COMMON] * 8, [*groups, *groups]):
        keys = [(3, i) for i in range(8)]
        expected = by_generate(model, prompts, **SAMPLED | {"keys": keys})
        assert decoder(prompts, **SAMPLED | {"keys": keys}).ids() == expected.ids()
    assert {len(store) for stores in decoder._decode._shared._layers for store in stores} == {4 * 5}


def test_a_model_that_is_cast_between_calls_decodes_in_its_new_type(monkeypatch, caplog) -> None:
    monkeypatch.setattr(prompts_module, "SHARED_FROM", 4)
    model, prompts = ONE_LAYER(torch.float32), [COMMON, PROMPTS[1]] * 4
    engine = TransformersEngine(model, tokenizer())
    engine(prompts, **long_run(4))
    model.double()
    expected = by_generate(model, prompts, **long_run(12))
    ours = engine(prompts, **long_run(12))
    assert ours.ids() == expected.ids()
    torch.testing.assert_close(ours.logprobs, expected.logprobs, rtol=0, atol=1e-6)
    assert engine._decode._shared.shape[1] == 2
    assert not caplog.messages


def test_a_layer_that_does_not_read_shared_keys_is_noticed(monkeypatch, caplog) -> None:
    model, prompts = tiny(), [COMMON, PROMPTS[1]] * 4
    expected = by_generate(model, prompts, **long_run(12))
    monkeypatch.setattr(prompts_module, "SHARED_FROM", 4)
    layer = model.model.layers[1].self_attn
    layer.config = copy.deepcopy(layer.config)
    layer.config._attn_implementation = "eager"
    assert TransformersEngine(model, tokenizer())(prompts, **long_run(12)).ids() == expected.ids()
    assert ["a layer of Qwen3ForCausalLM" in message for message in caplog.messages] == [True]


def test_a_kernel_that_refuses_shared_keys_is_named_and_each_row_keeps_its_own(monkeypatch, caplog) -> None:
    def refuses(*_: object) -> None:
        raise RuntimeError("no kernel for these strides")

    model, prompts = tiny(), [COMMON, PROMPTS[1]] * 4
    expected = by_generate(model, prompts, **long_run(12))
    monkeypatch.setattr(prompts_module, "SHARED_FROM", 4)
    monkeypatch.setattr(decode_attention, "_with_logsumexp", refuses)
    assert TransformersEngine(model, tokenizer())(prompts, **long_run(12)).ids() == expected.ids()
    assert ["kernel refuses Qwen3Attention: no kernel for these strides" in one for one in caplog.messages] == [True]


SIZES = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "initializer_range": 0.3,
}
HEADS_4 = {"num_attention_heads": 4, "num_key_value_heads": 4}
FALCON = SIZES | {"num_attention_heads": 4}
OTHER = "Attention uses other keys or values than its cache's"


@pytest.mark.parametrize("prompts", [[COMMON, PROMPTS[1]] * 4, [[*COMMON, 60 + i, 3] for i in range(8)]])
@pytest.mark.parametrize(
    ("config", "obstacle"),
    [
        (DiffLlamaConfig(**SIZES, **HEADS_4), f"DiffLlama{OTHER}"),  # it repeats values
        (
            DeepseekV3Config(
                **SIZES, **HEADS_4, q_lora_rank=8, kv_lora_rank=8, v_head_dim=8, qk_rope_head_dim=4,
                qk_nope_head_dim=8, first_k_dense_replace=2,
            ),
            f"DeepseekV3{OTHER}",  # it caches them before a projection
        ),
        (FalconConfig(**FALCON), "FalconForCausalLM does not use transformers' attention interface"),
    ],
    ids=["DiffLlama", "DeepSeek", "Falcon"],
)  # fmt: skip
def test_a_model_that_attends_in_its_own_way_shares_nothing(config, obstacle, prompts, monkeypatch, caplog) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    expected = by_generate(model, prompts, **long_run(12))
    monkeypatch.setattr(prompts_module, "SHARED_FROM", 4)
    engine = TransformersEngine(model, tokenizer())
    ours = engine(prompts, **long_run(12))
    assert ours.ids() == expected.ids()
    torch.testing.assert_close(ours.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    assert caplog.messages == [f"each completion keeps the keys of its whole prompt: {obstacle}"]
    assert engine(prompts[:1], **GREEDY).texts


@pytest.mark.parametrize(("steps", "said"), [(256, 0), (64, 1)], ids=["one forward holds all", "too many rows"])
def test_a_model_that_scales_queries_by_their_place_takes_a_shared_beginning(steps, said, monkeypatch, caplog) -> None:
    sizes = SIZES | {"num_hidden_layers": 4, "intermediate_size_mlp": 48, "num_local_experts": 2, "head_dim": 8}
    config = Llama4TextConfig(**sizes, **HEADS_4, attention_chunk_size=16, floor_scale=steps, pad_token_id=0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    prompts = [[*COMMON, *COMMON, 60 + i, *range(70, 70 + 2 * i)] for i in range(8)]
    expected = by_generate(model, prompts, **long_run(12))
    monkeypatch.setattr(prompts_module, "SHARED_FROM", 40)
    engine = TransformersEngine(model, tokenizer())
    for _ in range(2):
        ours = engine(prompts, **long_run(12))
        assert ours.ids() == expected.ids()
        torch.testing.assert_close(ours.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    whole = "prompts are fed whole, although all begin alike: Llama4ForCausalLM scales queries by their place"
    assert sum(message.startswith(whole) for message in caplog.messages) == said


def long_run(tokens: int) -> dict:
    """Eight rows that do not end before `tokens`."""
    return SAMPLED | {"keys": [(3, i) for i in range(8)], "max_completion_length": tokens}


EIGHT = [PROMPTS[1]] * 4 + [PROMPTS[2]] * 4


@pytest.mark.parametrize("captured", [False, True])
def test_the_host_waits_once_in_sixteen_tokens(captured, replays) -> None:
    model, counts = ONE_LAYER(), []
    expected = by_generate(model, EIGHT, **long_run(18))
    with a_device() as waits:
        engine = TransformersEngine(put_on_device(model), tokenizer(), captured=captured)
        assert [note[:25] for note in engine.notes[captured:]] == ["decoding is not captured,"] * (not captured)
        for tokens in (2, 18):
            result = engine(EIGHT, **long_run(tokens))
            counts.append(len(waits.seen))
            waits.seen.clear()
        assert result.ids() == expected.ids()
    assert counts[1] - counts[0] == 1


def test_rows_that_have_ended_leave_and_completions_stay_in_their_places(replays) -> None:
    model, fed = ONE_LAYER(), []
    model.generation_config.eos_token_id = [*range(0, 512, 16)]  # one in 16 tokens ends
    prompts, keys = [*EIGHT, LONG] * 4, [(5, i) for i in range(36)]
    sampled = SAMPLED | {"keys": keys, "max_completion_length": 80}
    expected = by_generate(model, prompts, **sampled)
    model.register_forward_pre_hook(lambda _, __, inputs: fed.append(len(inputs["input_ids"])), with_kwargs=True)
    for captured in (False, True):
        ours = TransformersEngine(model, tokenizer(), captured=captured)(prompts, **sampled)
        assert ours.ids() == expected.ids()
        assert ours.truncated.tolist() == expected.truncated.tolist()
        torch.testing.assert_close(ours.logprobs, expected.logprobs, rtol=0, atol=1e-5)
        rows = [count for count, *_ in replays] if captured else [*fed]
        assert rows == sorted(rows, reverse=True)
        if captured:
            assert {*rows} == {64, 16, 8}
        else:  # as many as go on, or a third more
            alive = [sum(length > t for length in ours.rows.lengths) for t in range(len(rows))]
            assert all(going <= count < max(4 / 3 * going, going + 1) for count, going in zip(rows, alive, strict=True))


@pytest.mark.parametrize("wider", [4096, 300])
def test_nuclei_larger_than_the_candidates_are_drawn_again_from_more_tokens(wider, replays, monkeypatch) -> None:
    monkeypatch.setattr(decoding, "_WIDER", {CANDIDATES: wider, wider: sys.maxsize})
    model = tiny()
    model.model.norm.weight.data.mul_(0.02)
    model.generation_config.eos_token_id = [*range(0, 512, 8)]  # the first draws end rows that go on
    engine = TransformersEngine(model, tokenizer(), captured=True)
    sampled = engine(EIGHT, **long_run(40))
    assert sampled.ids() == by_generate(model, EIGHT, **long_run(40)).ids()
    assert max(int(kept.counts.max()) for kept in sampled.kept_tokens) > CANDIDATES
    graphs = [candidates for *_, candidates, _ in replays]
    assert graphs[:18] == [CANDIDATES] * 15 + [wider] * 3  # those of all tokens are looked at one by one
    assert graphs[18:] == ([300] * 4 if wider == 300 else [wider] * (len(graphs) - 18)) != []  # again after 16 tokens
    assert {size: kept.shape[1] for size, kept in engine._decode._kept.items()} == {CANDIDATES: 16, wider: 4}
    assert not engine._decode._looked_at.numel()


def test_the_cache_and_the_graphs_stay_until_it_must_grow_or_weights_move(replays, caplog) -> None:
    model = ONE_LAYER()
    engine = TransformersEngine(model, tokenizer(), captured=True, longest=100)
    texts = engine(PROMPTS, **SAMPLED).texts
    keys = engine._decode._layers[0].keys
    assert keys.shape[0::2] == (8, 193)  # rows and tokens
    keys.fill_(torch.nan)
    assert engine(PROMPTS, **SAMPLED).texts == texts
    for prompts, length in ((PROMPTS[:1], 20), (PROMPTS, 12), ([LONG * 4], 20)):
        engine(prompts, max_completion_length=length)
    assert engine._decode._layers[0].keys is keys
    assert not caplog.messages
    engine([LONG] * 9, max_completion_length=20)
    assert engine._decode._layers[0].keys.shape[0::2] == (16, 193)
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    engine(PROMPTS, **SAMPLED)
    again = "CUDA graphs of decoding will be captured again: "
    assert caplog.messages == [f"3 {again}the cache grows to 16 rows, 84 tokens", f"1 {again}the weights have moved"]
