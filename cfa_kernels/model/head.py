"""Read a causal model's output layer, and compute logits and log-probs with it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..ops.linear_logprob import linear_logprob
from ..ops.matmul import product
from .modes import exchanged


@dataclass(frozen=True)
class Head:
    """The output layer: `logits = softcap(logit_scale * (hidden @ weight.T + bias))`."""

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    softcap: float | None = None
    logit_scale: float = 1.0

    @property
    def options(self) -> dict[str, Any]:
        """Keyword options of `linear_logprob` and `linear_policy_loss` that this head implies."""
        return {"bias": self.bias, "softcap": self.softcap, "logit_scale": self.logit_scale}

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits (R, V) of `hidden` (R, H), differentiable."""
        return self.transformed(nn.functional.linear(hidden, self.weight, self.bias))

    def transformed(self, linear: Tensor) -> Tensor:
        """Scale and cap results of the linear layer; returns a new tensor, differentiable."""
        logits = self.logit_scale * linear
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
        """Compute log-probs of `targets` (R,) given `hidden` (R, H), fp32, in nats."""
        return linear_logprob(hidden, self.weight, targets, temperature=temperature, **self.options)


def read_head(model: PreTrainedModel) -> Head:
    """Read the head's weight and bias; raise `NotImplementedError` unless it is a plain linear layer."""
    layer: Any = model.get_output_embeddings()
    if hasattr(layer, "modules_to_save"):
        layer = layer.original_module if layer.disable_adapters else layer.modules_to_save[layer.active_adapter]
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        # An adapter on it may be the identity today and drift in training.
        raise NotImplementedError(
            f"model: the output layer of {type(model).__name__} is {type(layer).__module__}.{type(layer).__name__}, "
            "not a plain linear layer; leave lm_head out of target_modules, or name it in modules_to_save"
        )
    return Head(layer.weight, layer.bias)


@contextmanager
def decoding_head(model: PreTrainedModel) -> Iterator[None]:
    """Multiply float32 rows with a plain linear head on a CPU as `ops.matmul` does, without gradients and autocast."""
    layer = model.get_output_embeddings()
    plain = type(layer) is nn.Linear and "forward" not in vars(layer)

    def forward(hidden: Tensor) -> Tensor:
        if torch.is_autocast_enabled(hidden.device.type) or torch.is_grad_enabled():
            return nn.Linear.forward(layer, hidden)
        logits = product(hidden.reshape(-1, hidden.shape[-1]), layer.weight.t()).view(*hidden.shape[:-1], -1)
        return logits if layer.bias is None else logits + layer.bias

    with exchanged([(layer, {"forward": forward})] if plain and layer.weight.device.type == "cpu" else []):
        yield
