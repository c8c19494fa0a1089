"""Which models are scored and trained through our head, and which are refused, by name, before anything is wrong."""

from types import SimpleNamespace

import accelerate
import peft
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cfa_kernels.model import attention
from cfa_kernels.model.check import verify
from cfa_kernels.model.modes import value_of
from cfa_kernels.model.parts import context_length
from cfa_kernels.rows import Rows
from cfa_kernels.scoring.packed import packed_logprobs
from cfa_kernels.span import Span
from cfa_kernels.tree.attention_options import EVERYTHING, Reach
from tests.support.models import (
    HYBRIDS,
    MASKED,
    OTHERS,
    PLACEHOLDER,
    VOCAB,
    assert_equals_naive,
    batch,
    make_model,
    score_columns,
)

HEAD_LORA = LoraConfig(target_modules=["lm_head"])


def score(model, data=None):
    return score_columns(model, *(data or batch()), mask=PLACEHOLDER)


def test_dynamic_rotary_frequencies_are_refused_by_row_beyond_their_length_and_exact_within():
    model = make_model("Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    model.model.rotary_emb.original_max_seq_len = model.model.rotary_emb.max_seq_len_cached = 64
    data = batch()
    assert_equals_naive(score(model), model, *data)
    data[1][1] = torch.cat([data[1][1]] * 3)
    data[3][1] = Span(90, 93)
    with pytest.raises(
        NotImplementedError, match="completions row 1: has 119 tokens with its prompt, but beyond 64 the dynamic"
    ):
        score(model, data)


@pytest.mark.parametrize("name", MASKED | OTHERS)
def test_windows_of_the_mask_sinks_latent_attention_and_scaled_heads_are_scored_exactly(name):
    model = make_model(name, **(MASKED | OTHERS)[name])
    if not model._can_set_attn_implementation():
        pytest.skip(f"{name} of transformers {transformers.__version__} does not use the attention interface")
    model.set_attn_implementation("eager")
    assert_equals_naive(score(model), model, *batch())


@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_with_a_state_take_it_up_where_their_branch_leaves(name):
    model = make_model(name, **HYBRIDS[name] | {"initializer_range": 0.1})  # their own rounding grows with the weights
    model.set_attn_implementation("eager")
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    assert_equals_naive(score(model), model, *batch(), tolerance=5e-4)  # chunked sums of delta rules round more
    assert [module.__dict__.get("forward") for module in model.modules()] == forwards


def scaled(model, factor):
    forward = model.forward

    def louder(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits * factor
        return out

    model.forward = louder
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_changed_after_the_head_are_refused_in_every_dtype(dtype):
    verify.check_supported(make_model("Qwen3").to(dtype))
    message = r"logits of Qwen3ForCausalLM are not its head's .* differ by \d\.\d+"
    with pytest.raises(NotImplementedError, match=message):
        verify.check_supported(scaled(make_model("Qwen3").to(dtype), 0.99))


@pytest.mark.parametrize(("dtype", "forwards"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_a_check_that_fails_is_made_again_only_where_float32_weights_may_be_the_cause(dtype, forwards):
    model, calls = make_model("Qwen3", num_hidden_layers=2).to(dtype), []

    def fails(*_):
        calls.append(None)
        raise KeyError("a hook's own")

    model.model.register_forward_pre_hook(fails)
    with pytest.raises(KeyError, match="a hook's own"):
        verify.check_supported(model)
    assert len(calls) == forwards


def test_a_cap_changed_after_a_check_is_read_anew():
    model = make_model("Gemma2", final_logit_softcapping=30.0)
    for cap in (30.0, 3.0, None):
        model.config.final_logit_softcapping = cap
        assert verify.check_supported(model).softcap == cap


def rescaled(model):
    model.logit_scale = 0.3


def hooked(model):
    model.lm_head.register_forward_hook(lambda _, args, out: 0.9 * out)


def shifted(model):
    forward = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: forward(x + 0.05 * x.roll(1, dims=1))


def mixes(module, args, out):
    return out + out.roll(1, 1)


CHANGES = {
    "scale": rescaled, "hook": hooked, "forward": lambda model: scaled(model, 0.9), "inner forward": shifted,
    "inner hook": lambda model: model.model.layers[0].mlp.register_forward_hook(mixes),
    "inner pre-hook": lambda model: model.model.layers[1].mlp.register_forward_pre_hook(lambda _, x: x[0].cumsum(1)),
    "hook on the norm": lambda model: model.model.norm.register_forward_hook(mixes),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_changed_after_its_self_check_is_checked_again(change):
    model = make_model("Cohere")
    verify.check_supported(model)
    CHANGES[change](model)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="model: "):
            verify.check_supported(model)


def attention_of_its_own(factor):
    def own(module, query, key, value, mask, scaling=None, **options):
        return sdpa_attention_forward(module, query, key, value, mask, scaling=factor * scaling, **options)

    return own


@pytest.fixture
def attention_named(monkeypatch):
    def register(name, function):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, function)
        monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, sdpa_mask)
        return name

    return register


@pytest.mark.parametrize(("name", "checked_before"), [("mine", True), ("sdpa", False)])
def test_attention_of_the_users_own_is_compared_as_it_is_set(name, checked_before, attention_named):
    model = make_model("Qwen3", initializer_range=0.3)
    if checked_before:
        verify.check_supported(model)
    model.set_attn_implementation(attention_named(name, attention_of_its_own(1)))
    verify.check_supported(model)
    attention_named(name, attention_of_its_own(2))
    with pytest.raises(NotImplementedError, match=rf"not compute the same .*: its attention '{name}' runs .*'sdpa'"):
        verify.check_supported(model)
    model.set_attn_implementation("eager")
    verify.check_supported(model)


def test_a_self_check_is_kept_while_nothing_changes(monkeypatch):
    model = make_model("Qwen3")

    def watch(_, args, out):
        return None

    hook = model.get_input_embeddings().register_forward_hook(watch)
    verify.check_supported(model)
    for _ in range(2):  # each adds a hook to the embedding, as TRL and PEFT do at every step
        model.enable_input_require_grads()
    monkeypatch.setattr(verify, "_run_probe", None)
    hook.remove()
    model.get_input_embeddings().register_forward_hook(watch)  # as NEFTune's comes and goes
    verify.check_supported(model)


def test_a_model_in_accelerates_autocast_is_checked_by_its_own_forward():
    model = make_model("Qwen3").cpu()
    AcceleratorState._reset_state(True)
    try:
        accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
        wrapped = accelerator.prepare_model(model)
        with accelerator.autocast():
            verify.check_supported(wrapped)
        assert wrapped(input_ids=torch.arange(4, 9)[None]).logits.dtype == torch.float32  # still accelerate's
    finally:
        AcceleratorState._reset_state(True)


@pytest.mark.parametrize("cap", [None, 30.0])
def test_a_cap_is_noticed_before_training_has_made_the_logits_large_enough_to_show_it(cap):
    head = verify.check_supported(make_model("Gemma2", initializer_range=0.001, final_logit_softcapping=cap))
    assert head.softcap == cap
    assert head.logit_scale == 1.0


@pytest.mark.parametrize("config", [peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]), HEAD_LORA])
def test_an_adapter_on_the_head_is_refused_even_while_it_changes_nothing(config):
    model = make_model("Qwen3")
    score(model)
    with pytest.raises(NotImplementedError, match=r"output layer of Qwen3ForCausalLM is peft.* leave lm_head out"):
        score(get_peft_model(model, config))


class OnlyFirstTokens(torch.nn.Module):
    """An adapter that starts as the identity and may come to look at the row's first token."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.gate = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.inner(x) + self.gate * x.mean(1, keepdim=True)


OnlyFirstTokens.__module__ = "peft.tuners.invented"


def test_an_adapter_in_the_body_that_starts_as_the_identity_is_checked_as_it_may_become():
    model = make_model("Qwen3")
    model.model.layers[0].mlp = OnlyFirstTokens(model.model.layers[0].mlp)
    with pytest.raises(NotImplementedError, match="does not compute the same in a packed tree"):
        verify.check_supported(model)


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((kind, "Qwen3") for kind in ("loha", "ia3", "oft")), ("lora", "Gemma2")],
)
def test_adapters_on_other_layers_are_scored_exactly_without_their_dropout(kind, name):
    targets = ["q_proj", "v_proj", "down_proj"]
    config = {
        "loha": peft.LoHaConfig(r=2, target_modules=targets),
        "ia3": peft.IA3Config(target_modules=targets, feedforward_modules=["down_proj"]),
        "lora": LoraConfig(r=2, lora_dropout=0.5, target_modules=targets, modules_to_save=["lm_head"]),
        "oft": peft.OFTConfig(oft_block_size=4, target_modules=targets, use_cayley_neumann=False),
    }[kind]
    model = get_peft_model(make_model(name, num_hidden_layers=2, tie_word_embeddings=False), config).train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += (0.1 * torch.randn(parameter.shape, generator=generator)).to(parameter)
    data = [column[:4] for column in batch()]
    scores = score(model, data)
    assert_equals_naive(scores, model, *data)
    with model.disable_adapter():  # a head that was saved beside the adapter goes back to the original one
        without = score(model, data)
        assert_equals_naive(without, model, *data)
    assert (scores.base - without.base).abs().nan_to_num().max() > 0.1


def tiny(name, **options):
    config = getattr(transformers, f"{name}Config")(vocab_size=VOCAB, num_hidden_layers=1, **options)
    return getattr(transformers, f"{name}ForCausalLM")(config)


REFUSED = {
    "must be a transformers causal language model, got Linear": lambda: torch.nn.Linear(2, 2),
    "Qwen3Model has no LM head": lambda: make_model("Qwen3").model,
    "BloomForCausalLM does not use transformers' attention interface": lambda: tiny("Bloom", hidden_size=16, n_head=2),
    r"MambaForCausalLM .*(linear_attention layers carry a state|layers with a state \(MambaMixer\))":
        lambda: tiny("Mamba", hidden_size=32),
    "PROMPT_TUNING adds virtual prompt tokens":
        lambda: get_peft_model(make_model("Qwen3"), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")),
    "activated LoRA": lambda: get_peft_model(
        make_model("Qwen3"), LoraConfig("CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[5, 6])
    ),
    r"RemBertForCausalLM has a layer between .* 32 wide, .* 48 wide": lambda: tiny(
        "RemBert", hidden_size=32, input_embedding_size=16, output_embedding_size=48, num_attention_heads=4,
        intermediate_size=48, is_decoder=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_models_that_cannot_be_scored_are_refused_by_name(message):
    with pytest.raises((NotImplementedError, TypeError), match=message):
        score(REFUSED[message]())


@pytest.mark.parametrize("size", [4, 4096])
def test_masks_are_read_from_the_function_that_builds_them(size):
    for rule, reach in (
        (lambda b, h, q, k: k <= q, EVERYTHING),
        (lambda b, h, q, k: (k <= q) & (q - k < size), Reach(window=size)),
        (lambda b, h, q, k: (k <= q) & (q // size == k // size), Reach(chunk=size)),
    ):
        assert attention.read_visibility(rule, size) == reach


@pytest.mark.parametrize("rows", [3, 9, 11])
def test_a_mask_that_reads_a_table_of_few_rows_has_the_window_that_the_configuration_declares(rows):
    window, table = 8, torch.full((rows,), -1)  # of images, as text has them

    def mask_of(config, rule):
        def reading(b, h, q, k):
            return rule(q, k) & (table[q] < 0)

        return attention._build_mask(mask_function=reading, local_size=window, config=config)

    running = attention.Running(SimpleNamespace(num_rows=20 + rows), None, first_row=20)
    slides, chunks = SimpleNamespace(sliding_window=window), SimpleNamespace(attention_chunk_size=window)
    with value_of(attention.RUNNING, running):
        assert mask_of(slides, lambda q, k: (k <= q) & (q - k < window)).reach == Reach(window=window)
        for config, rule in ((chunks, lambda q, k: k <= q), (slides, lambda q, k: k <= q + 1), (None, torch.ge)):
            with pytest.raises(NotImplementedError, match="its attention mask"):
                mask_of(config, rule)


@pytest.mark.parametrize(
    "rule",
    [
        lambda b, h, q, k: k >= 0, lambda b, h, q, k: (k <= q) & (q - k < 6), lambda b, h, q, k: (k <= q) | (k < 3),
        lambda b, h, q, k: torch.zeros(4, dtype=torch.bool)[q], lambda b, h, q, k: torch.ones(40)[q] * (k <= q - 2),
    ],
)  # fmt: skip
def test_a_mask_of_any_other_rule_is_refused(rule):
    with pytest.raises(NotImplementedError, match="its attention mask"):
        attention.read_visibility(rule, 5)


@pytest.mark.parametrize(
    ("rope", "most", "longest"),
    [
        ({"rope_type": "default"}, 64, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 64, 256),
        ({"rope_type": "linear", "factor": 2.0}, 64, 128),
    ],
    ids=str,
)
def test_a_context_that_is_stretched_is_the_longer_one(rope, most, longest):
    model = make_model("Qwen3", max_position_embeddings=most, rope_parameters={"rope_theta": 1e4} | rope)
    assert context_length(model) == longest
    rows = Rows([torch.arange(4)], [torch.arange(longest - 3) % VOCAB])
    with pytest.raises(ValueError, match=f"exceed the model's context of {longest}"):
        packed_logprobs(model, rows)
    assert packed_logprobs(model, Rows(rows.prompts, [rows.completions[0][:-1]]))[0].isfinite().all()
