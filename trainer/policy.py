"""Load the policy with its tokenizer, keep its reference, and save it.

This is the trainer's one contact with PEFT and with files of weights.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from cfa_kernels.hf.liger import keep_own_modules
from trainer.config import TrainConfig, model_path
from trainer.precision import frozen_copy
from trainer.processes import is_first, whole_state

_NAMES_SHOWN = 5


def require_model_files(name: str) -> None:
    """Raise an error that names a model unless its folder has what is read from it; a hub name is left to the hub.

    Of weights in safetensors only the header is read, which says how long the file must be.
    """
    folder = Path(model_path(name))
    if folder.is_file():
        raise NotADirectoryError(f"model {name}: is a file; name a folder, or a model on the hub")
    if not folder.is_dir():
        if folder.is_absolute() or name.startswith(".") or len(folder.parts) > 2:
            raise FileNotFoundError(f"model {name}: there is no such folder")
        return
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ValueError(
            f"model {name}: its folder has an adapter only; merge it into its model (merge_and_unload of PEFT), save "
            "that with its tokenizer, and name that folder"
        )
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"model {name}: its folder has no config.json")
    index = folder / "model.safetensors.index.json"
    weights = ["model.safetensors"]
    if index.is_file():
        try:
            weights = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise ValueError(f"model {name}: {index} is not an index of weights: {problem!r}") from problem
        if absent := [file for file in weights if not (folder / file).is_file()]:
            raise FileNotFoundError(f"model {name}: {index} names {absent[0]}, which is not there")
    elif not (folder / weights[0]).is_file():
        if not list(folder.glob("*.bin")):
            raise FileNotFoundError(f"model {name}: its folder has no weights, expected {folder / weights[0]}")
        return
    for file in weights:
        try:
            with safe_open(folder / file, "pt"):
                pass
        except SafetensorError as problem:
            raise ValueError(
                f"model {name}: {folder / file} is not whole safetensors: {problem}; copy or download it again"
            ) from problem


def load_tokenizer(config: TrainConfig) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig]:
    """Load the tokenizer, with a pad token and left padding, and the configuration of the model that it is for.

    Raises `ValueError` naming the model if one cannot be loaded, the tokenizer has no token to pad with or does not
    know ordinary text, or the model does not know a token that the tokenizer gives.
    """
    with _loading(config.model, "configuration"):
        architecture = AutoConfig.from_pretrained(model_path(config.model))
    with _loading(config.model, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(model_path(config.model), padding_side="left")
        known = tokenizer("What is 3 + 4?")["input_ids"]
    if not known:  # transformers makes an empty tokenizer where it finds no file of one
        raise ValueError(f"model {config.model}: its tokenizer gives no token for text; has it a tokenizer.json?")
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(f"model {config.model}: its tokenizer has neither a pad nor an end-of-text token")
        tokenizer.pad_token = tokenizer.eos_token
    largest = max(*known, tokenizer.pad_token_id, tokenizer.eos_token_id or 0)
    size = getattr(architecture.get_text_config(), "vocab_size", None)
    if size is not None and largest >= size:
        raise ValueError(
            f"model {config.model}: its tokenizer gives token {largest}, beyond the model's vocabulary (vocab_size "
            f"{size}); it is another model's"
        )
    return tokenizer, architecture


def load_policy(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """Load the model to train, on its device and in eval mode.

    Raises:
        ValueError: the model cannot be loaded, its checkpoint does not hold exactly its tensors, or neither it
            nor the tokenizer names a token that ends a completion; the message
            names model and tensors.
        FloatingPointError: a weight is not finite; the message names it.
    """
    model = _load_whole(config.model, config.precision.weights)
    model.to(config.precision.device)
    require_finite_parameters(model)
    if not config.use_liger_kernel:
        keep_own_modules(model)
    # Sampling must follow the distribution that the loss differentiates: a repetition penalty or a top-k that the
    # model's own generation settings carry would bend it.
    model.generation_config = GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    if tokenizer.eos_token is None and model.generation_config.eos_token_id is None:
        raise ValueError(
            f"model {config.model}: neither its tokenizer nor its generation settings name a token that ends a "
            "completion; set eos_token in tokenizer_config.json"
        )
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    if config.use_peft:
        from peft import LoraConfig, get_peft_model  # needed only where an adapter trains

        adapter = LoraConfig(r=config.lora_r, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapter)
    return model.eval()


@contextlib.contextmanager
def _loading(name: str, part: str) -> Iterator[None]:
    """Name the model and its part where transformers does not; every file and version has errors of its own."""
    try:
        yield
    except ImportError:
        raise
    except Exception as problem:
        said = str(problem).partition("\n")[0]
        raise ValueError(f"model {name}: its {part} cannot be loaded: {type(problem).__name__}: {said}") from problem


def _load_whole(name: str, dtype: torch.dtype) -> Any:
    """A causal model whose every tensor comes from its checkpoint, and whose checkpoint has every tensor used.

    transformers by itself gives a tensor that is missing random values. Tied weights and what a model declares
    optional or to be ignored are not missed.
    """
    with _loading(name, "weights"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_path(name), dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    model, found = loaded
    faults = []
    if found["missing_keys"]:
        faults.append(f"lacks {_listed(found['missing_keys'])}")
    if found["unexpected_keys"]:
        faults.append(f"holds {_listed(found['unexpected_keys'])}, for which the model has no place")
    if mismatched := found["mismatched_keys"]:
        sizes = [
            f"{tensor} as {tuple(saved)} where the model needs {tuple(needed)}" for tensor, saved, needed in mismatched
        ]
        faults.append(f"holds {_listed(sizes)}")
    if faults:
        raise ValueError(
            f"model {name}: its checkpoint does not fit {type(model).__name__}: it {'; it '.join(faults)}. What the "
            "model would compute is not what was saved"
        )
    return model


def _listed(names: Sequence[str]) -> str:
    """List the first few names in order, and how many more there are."""
    shown = sorted(names)[:_NAMES_SHOWN]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def require_finite_parameters(model: nn.Module, gathered: Mapping[str, Tensor] | None = None) -> None:
    """Raise `FloatingPointError` naming the first parameter of `model` that holds a nan or an infinity.

    Where only pieces of them are here, `gathered` holds them by name.
    """
    for name, parameter in model.named_parameters() if gathered is None else gathered.items():
        if not parameter.isfinite().all():
            raise FloatingPointError(f"model: parameter {name} is not finite")


def save_policy(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the adapter, or all weights, and the tokenizer; several processes call it, the first writes.

    Raises:
        FloatingPointError: a parameter is not finite; nothing is written, the message names it.
    """
    state = whole_state(model)
    if not is_first():
        return
    require_finite_parameters(model, state)
    model.save_pretrained(folder, **{} if state is None else {"state_dict": state})
    tokenizer.save_pretrained(folder)


class Reference:
    """Model as it was loaded, for the KL term: the policy with its adapter off, or a frozen copy.

    Attributes:
        copy: that copy; None without one.
    """

    def __init__(self, policy: nn.Module) -> None:
        self._policy = policy
        self.copy = None if hasattr(policy, "disable_adapter") else frozen_copy(policy)

    @contextlib.contextmanager
    def model(self) -> Iterator[nn.Module]:
        """Give the reference while the context lasts."""
        if self.copy is not None:
            yield self.copy
        else:
            with self._policy.disable_adapter():  # type: ignore[operator]
                yield self._policy
