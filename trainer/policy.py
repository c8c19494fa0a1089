"""Load the policy with its tokenizer, and save it: the trainer's one contact with PEFT and with files of weights."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils import is_liger_kernel_available

from .config import TrainConfig
from .processes import rank
from .settings import model_path

# On the host; one copy of tensors that are sharded, by the process of rank 0. Frozen and tied weights are not there.
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False)


@contextlib.contextmanager
def _loading(name: str) -> Iterator[None]:
    """Name the model where transformers does not; errors differ by file and version."""
    try:
        yield
    except Exception as problem:
        said = str(problem).partition("\n")[0]
        raise ValueError(f"model {name}: cannot be loaded: {type(problem).__name__}: {said}") from problem


def load_tokenizer(config: TrainConfig) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig]:
    """Load the tokenizer, with a pad token and left padding, and the configuration of the model that it is for."""
    name = config.model
    with _loading(name):
        architecture = AutoConfig.from_pretrained(model_path(name))
        tokenizer = AutoTokenizer.from_pretrained(model_path(name), padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        known = tokenizer("What is 3 + 4?")["input_ids"]
    size = getattr(architecture.get_text_config(), "vocab_size", None)
    if not known or (size is not None and max(known) >= size):  # transformers makes an empty one where it finds no file
        raise ValueError(f"model {name}: its tokenizer gives ids {known} for text, and its vocab_size is {size}")
    return tokenizer, architecture


def load_policy(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, *, compiles: bool = False) -> nn.Module:
    """Load the model to train, on its device and in eval mode, with kernels that suit layers that will be compiled.

    Raises `ValueError` for a checkpoint that does not hold exactly its tensors, `FloatingPointError` for a nan.
    """
    with _loading(config.model):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_path(config.model), dtype=config.precision.weights, output_loading_info=True
        )
    model, info = loaded
    for fault in ("missing_keys", "unexpected_keys"):  # to the former transformers gives random values
        if names := sorted(info[fault]):
            raise ValueError(f"model {config.model}: its checkpoint has {len(names)} {fault}: {', '.join(names[:5])}")
    model.to(config.precision.device)
    require_finite_weights(dict(model.named_parameters()))
    if config.precision.device.type == "cuda" and is_liger_kernel_available():
        # Compiled layers put Liger's norms and gates aside, but cannot its rotary embeddings.
        apply_liger_kernel(model, {"rope": not compiles, "cross_entropy": False, "fused_linear_cross_entropy": False})
    # Sampling must follow the distribution that the loss differentiates: a repetition penalty or a top-k that the
    # model's own generation settings carry would bend it.
    model.generation_config = GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    if tokenizer.eos_token is None and model.generation_config.eos_token_id is None:
        raise ValueError(f"model {config.model}: no token ends a completion; set eos_token in tokenizer_config.json")
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    if config.use_peft:
        from peft import LoraConfig, get_peft_model  # needed only where an adapter trains

        adapter = LoraConfig(r=config.lora_r, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        with warnings.catch_warnings(category=FutureWarning, action="ignore"):  # PEFT asks for an old name
            model = get_peft_model(model, adapter)
    return model.eval()  # dropout would make the update's log-probs other than those that were sampled with


def require_finite_weights(weights: Mapping[str, Tensor]) -> None:
    """Raise `FloatingPointError` naming the first weight that holds a nan or an infinity."""
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise FloatingPointError(f"model: parameter {name} is not finite")


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Gather buffers and the weights that train, tied ones once, on the first process; all call this."""
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - dict(model.named_parameters()).keys()
    state: dict[str, Any] = get_model_state_dict(model, options=WHOLE)
    return {name: tensor for name, tensor in state.items() if rank() == 0 and name not in tied}


def save_policy(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the adapter, or all weights if they are finite, and the tokenizer; all call this, the first writes."""
    state = trained_state(model)
    if rank() == 0:
        require_finite_weights(state)
        model.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)
