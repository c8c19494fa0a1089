"""Small language models of many architectures, ragged batches, and scores by one plain forward per span."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, get_peft_model

from cfa_kernels.batch import Batch
from cfa_kernels.model.parts import causal_lm
from cfa_kernels.rows import Rows
from cfa_kernels.scoring.branches import check_ids
from cfa_kernels.scoring.masked import score_counterfactuals
from cfa_kernels.span import Span
from tests.support.as_on_gpu import DEVICE

VOCAB, PLACEHOLDER = 211, 3
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,  # heads of 16: kernels take multiples of 8
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Weights large enough that a masked span moves the answer by whole nats.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TREE = ["Qwen2", "Qwen3", "Llama", "Mistral", "Gemma2", "Gemma3Text", "Phi3", "Olmo2"]
ARCHITECTURES = {
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Llama": {},
    "Mistral": {"sliding_window": 9},
    # Eager: some versions of transformers leave Gemma 2's softcap out of their default attention.
    "Gemma2": {"head_dim": 16, "sliding_window": 9, "attn_implementation": "eager"},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 9},
    "Phi3": {},
    "Olmo2": {},
    # Heads that scale their logits, and mixtures of experts.
    "Granite": {"logits_scaling": 3.0},
    "Cohere": {"logit_scale": 0.25},
    "Qwen3Moe": {"head_dim": 16, **MOE},
}

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 32,
}  # fmt: skip
MASKED = {
    "Qwen2Moe": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3, **MOE},
    "Phimoe": {"sliding_window": 9, "num_local_experts": 4},
    "Llama4Text": {
        "head_dim": 16, "attention_chunk_size": 8, "num_hidden_layers": 4, "num_local_experts": 2,
        "intermediate_size_mlp": 64,
    },
    "Exaone4": {"head_dim": 16, "sliding_window": 9, "sliding_window_pattern": 2},
}  # fmt: skip
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
OTHERS = {
    "StableLm": {"hidden_size": 64},
    "Nemotron": {},
    "GptOss": {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 9},
    "DeepseekV3": {
        **MLA, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    },
    "MiniCPM3": {**MLA, "num_key_value_heads": 4, "dim_model_base": 16},
    "HyperCLOVAX": {"logits_scaling": 1.5, "head_dim": 16},
}  # fmt: skip
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "num_hidden_layers": 4, "head_dim": 16,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
HYBRIDS = {
    "Qwen3Next": {**DELTA, **MOE, "shared_expert_intermediate_size": 16},
    "Qwen3_5Text": DELTA,
    "Mamba2": {"state_size": 8, "head_dim": 16, "num_heads": 8, "n_groups": 1, "chunk_size": 8},
    "Bamba": {"attn_layer_indices": [1], **MAMBA},
    "FalconH1": {"mamba_d_ssm": 128, "lm_head_multiplier": 0.3, "head_dim": 16, "num_hidden_layers": 2, **MAMBA},
    "Lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
}


def skip_before(release: str, what: str) -> None:
    if Version(transformers.__version__) < Version(release):
        pytest.skip(f"transformers {transformers.__version__} {what}; run with {release} or newer")


def skip_unless_runs(name: str) -> None:
    """Skip the test where the installed transformers has no such type of model, or cannot continue its state."""
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    if name in HYBRIDS:
        skip_before("5.15", f"cannot continue the state of {name}")


def make_model(name: str, **changes):
    skip_unless_runs(name)
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **ARCHITECTURES.get(name, {}), **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases that start at one or zero would hide mistakes
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model.to(DEVICE)


def small_model(**changes):
    shape = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    return make_model("Qwen3", **shape | changes)


def small_adapted(layers=1, **config):
    """The same with adapters off the identity that they start as, in training mode."""
    options = {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    return get_peft_model(small_model(num_hidden_layers=layers), LoraConfig(**options | config)).train()


class _Exact:
    """Torch with float64 in the place of float32, which models' code casts to."""

    float = float32 = torch.float64

    def __getattr__(self, name: str):
        return getattr(torch, name)


@contextmanager
def float64_throughout(model) -> Iterator[None]:
    """Run a model in float64, also where its own code would name float32, as chunks of linear attention do."""
    modules = {sys.modules[type(module).__module__] for module in model.modules()}
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            if module.__name__.startswith("transformers.models."):
                patch.setattr(module, "torch", _Exact())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)  # of rotary angles, before transformers 5.23
        if hasattr(model, "set_experts_implementation"):  # grouped products have no float64,
            model.set_experts_implementation("eager")
        yield model.cpu().double()  # nor have kernels


def tokens(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCAB, (n,), generator=generator) for n in lengths]


def batch():
    """Ragged groups: shared and single prompts, a shared completion prefix, a repeated row, a row without answer."""
    first, second = tokens(7, 20)
    completions = tokens(20, 33, 17, 41, 30, 12, seed=1)
    completions[4][:12] = completions[0][:12]
    prompts = [first, second, first.clone(), second, first, tokens(3, seed=2)[0], first]
    completions.append(completions[0].clone())
    answers = [Span(15, 18), Span(30, 33), Span(10, 12), None, Span(25, 28), Span(0, 2), Span(15, 18)]
    spans = [
        [Span(1, 4), Span(3, 9), Span(14, 15), Span(18, 20)], [Span(0, 5), Span(20, 30), Span(20, 30)], [Span(0, 1)],
        [Span(2, 3)], [Span(5, 12), Span(12, 20)], [], [Span(1, 4), Span(0, 15)],
    ]  # fmt: skip
    return prompts, completions, spans, answers


def batch_of(
    model, prompts, completions, units=None, answers=None, *, mask=PLACEHOLDER, token_budget=None, seed=(), index=None,
    **known,
) -> Batch:  # fmt: skip
    rows = Rows(prompts, completions, index)
    check_ids(causal_lm(model), rows)
    known |= {"units": units or [()] * len(rows), "answers": answers or [None] * len(rows)}
    return Batch(rows, placeholder=mask, token_budget=token_budget, seed=seed, **known)


def score_forward(forward, spans, answers, *, token_budget=None, **options):
    return forward.score(Batch(forward.rows, units=spans, answers=answers, token_budget=token_budget), **options)


def score_columns(model, prompts, completions, spans, answers, **options):
    return score_counterfactuals(model, Rows(prompts, completions), spans, answers, **options)


SMALL_ROWS = [tokens(4)[0]] * 2, tokens(7, 6, seed=1)
SMALL_SPANS = [[Span(1, 3)], [Span(0, 2)]], [Span(5, 7), Span(4, 6)]  # and answers


def naive(model, prompt, completion, answer, span=None):
    """Log P(answer) by one plain full forward with `span` replaced."""
    return sum(naive_row(model, prompt, completion, span)[slice(*answer)].tolist())


def naive_row(model, prompt, completion, span=None):
    """(T,) log-probs of a completion by one plain full forward with `span` replaced."""
    return naive_rows(model, prompt, completion, [span])[0]


def naive_rows(model, prompt, completion, spans):
    """(K, T) log-probs of a completion with each of the spans replaced, or with nothing, by a plain full forward."""
    ids, training = torch.cat([prompt, completion]).repeat(len(spans), 1), model.training
    for row, span in zip(ids, spans, strict=True):
        if span is not None:
            row[len(prompt) + span.start : len(prompt) + span.end] = PLACEHOLDER
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids.to(model.device)).logits[:, len(prompt) - 1 : -1].cpu()
    model.train(training)
    return at_least_float32(logits).log_softmax(-1).gather(2, ids[:, len(prompt) :, None])[..., 0]


def at_least_float32(logits):
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


TOLERANCE = 5e-5 if torch.cuda.is_available() else 2e-5  # of some 30 nats in float32; a GPU's exp is off by 2 ulp


def assert_equals_naive(scores, model, prompts, completions, spans, answers, tolerance=TOLERANCE):
    for b, answer in enumerate(answers):
        assert len(scores.masked[b]) == len(scores.drop[b]) == len(spans[b])
        if answer is None:
            assert torch.isnan(scores.base[b])
            assert torch.isnan(scores.drop[b]).all()
            continue
        lines = naive_rows(model, prompts[b], completions[b], [None, *spans[b]])
        base, *masked = [sum(line[slice(*answer)].tolist()) for line in lines]
        assert abs(scores.base[b].item() - base) <= tolerance
        for k, value in enumerate(masked):
            assert abs(scores.masked[b][k].item() - value) <= tolerance
            assert abs(scores.drop[b][k].item() - (base - value)) <= 2 * tolerance


def plain_logprobs(model, prompts, completions, temperature=1.0, *, with_entropies=False):
    """Log-probs of each completion by a full forward of its own, and perhaps entropies, with gradient."""
    logprobs, entropies = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.cat([prompt, completion]).to(model.device)
        logits = at_least_float32(model(input_ids=ids[None], use_cache=False).logits[0]) / temperature
        rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
        logprobs.append(rows.gather(1, ids[len(prompt) :, None])[:, 0])
        entropies.append(-(rows.exp() * rows).sum(-1))
    return (logprobs, entropies) if with_entropies else logprobs


def assert_same_gradients(ours, theirs, tolerance=1e-5):
    """By norm; what is below a thousandth of the largest, as of a key's bias, which moves no softmax, is rounding."""
    assert ours.keys() == theirs.keys()
    largest = max(gradient.norm() for gradient in theirs.values())
    assert largest > 0
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= tolerance * max(gradient.norm(), 1e-3 * largest), name


def snapshot(model):
    """Modes, tensors with values and gradients, hooks, attention and random state: what a call must not change."""

    def numbers(x):
        return None if x is None else (id(x), hash(x.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()))

    tensors = [*model.named_parameters(), *model.named_buffers()]
    modules = list(model.modules())
    return {
        "modes": [module.training for module in modules],
        "tensors": [(name, x.dtype, x.requires_grad, numbers(x)) for name, x in tensors],
        "gradients": [numbers(parameter.grad) for parameter in model.parameters()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in modules],
        "forwards": ["forward" in vars(module) for module in modules], "attention": model.config._attn_implementation,
        "with gradients": torch.is_grad_enabled(), "random": hash(torch.get_rng_state().numpy().tobytes()),
    }  # fmt: skip
