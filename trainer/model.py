"""Load the policy and its tokenizer, wrap it in LoRA, and take log-probs of completions.

Where it stands: the trainer's one contact with transformers and PEFT model classes.
"""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from cfa_kernels import linear_logprob
from cfa_kernels.hf import causal_lm, read_head
from trainer.config import TrainConfig, model_path


def resolve_device(device: str) -> torch.device:
    """`auto` is the first GPU if there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def resolve_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 for a frozen base on a GPU; float32 on a CPU or where all weights train.

    Weights that train need float32: a step of AdamW is smaller than the gap between neighbouring bfloat16 numbers.
    """
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    return torch.bfloat16 if device.type == "cuda" and config.use_peft else torch.float32


def load_policy(config: TrainConfig) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """The model to train, on its device and in eval mode, and its tokenizer with a pad token and left padding."""
    path, device = model_path(config.model), resolve_device(config.device)
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=resolve_dtype(config, device))
    model.to(device)
    if config.use_liger_kernel and device.type == "cuda":
        fuse_layers(model)
    # Sampling must follow the distribution that the loss differentiates: a repetition penalty or a top-k that the
    # model's own generation settings carry would bend it.
    model.generation_config = GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(f"model {config.model}: its tokenizer has neither a pad nor an end-of-text token")
        tokenizer.pad_token = tokenizer.eos_token
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    if config.use_peft:
        from peft import LoraConfig, get_peft_model  # needed only where an adapter trains

        modules = config.lora_target_modules
        model = get_peft_model(
            model,
            LoraConfig(
                r=config.lora_r,
                lora_alpha=config.lora_alpha,
                lora_dropout=config.lora_dropout,
                target_modules="all-linear" if modules == ["all-linear"] else modules,
                task_type="CAUSAL_LM",
            ),
        )
    return model.eval(), tokenizer


def fuse_layers(model: Any) -> None:
    """Liger's fused layers in place of the model's own, without its losses; other models stay as they are."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # needed only on a GPU

    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)


class Reference:
    """The model as it was loaded, for the KL term: the policy with its adapter off, or a frozen copy."""

    def __init__(self, policy: nn.Module) -> None:
        self._policy = policy
        self._copy = None if hasattr(policy, "disable_adapter") else copy.deepcopy(policy).requires_grad_(False)

    @contextlib.contextmanager
    def model(self) -> Iterator[nn.Module]:
        """The reference, while the context lasts."""
        if self._copy is not None:
            yield self._copy
        else:
            with self._policy.disable_adapter():  # type: ignore[operator]
                yield self._policy


def completion_logprobs(
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    *,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Log-probs of completion tokens and entropies of the distributions they come from, both (B, T) fp32, nats.

    Prompts (B, P) are left-padded, completions (B, T) right-padded; padding holds 0. The head runs on counted rows
    alone and logits are never held as a whole. Differentiable by the model's parameters.
    """
    causal = causal_lm(model)
    head = read_head(causal)
    mask = torch.cat([prompt_mask, completion_mask], 1)
    hidden = causal.base_model(
        input_ids=torch.cat([prompt_ids, completion_ids], 1),
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
    ).last_hidden_state[:, prompt_ids.shape[1] - 1 : -1]  # (B, T, H): the row before a token predicts it
    counted = completion_mask.bool()
    rows = linear_logprob(
        hidden[counted],
        head.weight,
        completion_ids[counted],
        bias=head.bias,
        temperature=temperature,
        softcap=head.softcap,
        logit_scale=head.logit_scale,
        return_entropy=True,
    )
    logprobs, entropies = (torch.zeros(counted.shape, device=mask.device).masked_scatter(counted, row) for row in rows)
    return logprobs, entropies


def save_policy(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the adapter, or all weights, and the tokenizer."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
