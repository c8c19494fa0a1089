"""Tiny policies with adapters, and prompts for them."""

import functools

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from trainer.settings import ASSETS

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [14, 15]]
SAMPLED = {"max_completion_length": 12, "keys": [(3, i) for i in range(4)], "top_p": 0.9}


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(ASSETS, padding_side="left")


def tiny(dtype: torch.dtype = torch.float64, **options) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    options = {"num_hidden_layers": 2, "num_key_value_heads": 2} | options
    config = Qwen3Config(
        vocab_size=512, hidden_size=32, intermediate_size=48, num_attention_heads=4, head_dim=8,
        initializer_range=0.3, eos_token_id=tokenizer().eos_token_id, **options,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(dtype).eval()


def adapted(model: nn.Module, adapters: int = 1, **options) -> PeftModel:
    """A model with adapters far from zero, all of them active."""
    config = LoraConfig(r=4, lora_alpha=8, **({"target_modules": "all-linear"} | options))
    model = get_peft_model(model, config)
    for i in range(1, adapters):
        model.add_adapter(f"adapter_{i}", config)
    model.base_model.set_adapter([*model.peft_config])
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("lora_B", "lora_embedding_B", "modules_to_save")):
            nn.init.normal_(parameter, std=0.2)
    return model.eval()
