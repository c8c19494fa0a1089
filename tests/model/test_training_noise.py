"""Noise of training mode is refused by name, and draws that no name tells by two calls that differ."""

import pytest
import torch

from cfa_kernels.model.check import verify
from tests.support.models import make_model

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
OPT = {"ffn_dim": 80, "word_embed_proj_dim": 48}
WHISPER = {"d_model": 48, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 80}

NOISY = {
    "functional dropout": ("OPT", OPT, "dropout=0"),
    "layers hardly ever left out": ("OPT", OPT | {"dropout": 0.0, "layerdrop": 1e-6}, "layerdrop=0"),
    "a decoder's dropout": ("Whisper", WHISPER | {"dropout": 0.1, "init_std": 0.2}, "dropout=0"),
    "jitter of routers": ("Mixtral", EXPERTS | {"router_jitter_noise": 0.3}, "router_jitter_noise=0"),
    "dropout of attention": ("Qwen3", {"head_dim": 16, "attention_dropout": 0.1}, "attention_dropout=0"),
    "dropout modules": ("Persimmon", {"num_key_value_heads": 4, "hidden_dropout": 0.2}, "hidden_dropout=0"),
}


@pytest.mark.parametrize("kind", NOISY)
def test_noise_of_training_mode_is_refused_with_what_to_set(kind):
    name, options, remedy = NOISY[kind]
    model, state = make_model(name, **options).train(), torch.get_rng_state()
    with pytest.raises(NotImplementedError, match=rf"model: {type(model).__name__} has .* set it to 0 \(.*{remedy}"):
        verify.check_trainable(model)
    assert torch.equal(torch.get_rng_state(), state)
    verify.check_trainable(model.eval())


def test_draws_that_change_nothing_are_no_noise():
    model = make_model("Qwen3").train()
    model.model.layers[0].register_forward_hook(lambda *_: draws.append(torch.rand([])))
    draws: list[torch.Tensor] = []
    verify.check_trainable(model)
    assert draws


def test_noise_that_a_hook_on_the_embedding_adds_later_is_noticed():
    model = make_model("Qwen3").train()
    verify.check_trainable(model)
    state = torch.get_rng_state()
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: out + 0.1 * torch.rand_like(out) if module.training else None
    )
    with pytest.raises(NotImplementedError, match=r"draws at random .* or its hooks, such as NEFTune's"):
        verify.check_trainable(model)
    assert torch.equal(torch.get_rng_state(), state)
    hook.remove()
    verify.check_trainable(model)
