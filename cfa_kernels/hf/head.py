"""Read a causal model's output layer, and compute logits and log-probs with it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..ops.linear_logprob import linear_logprob


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
        """Scale, then cap what the linear layer gives; returns a new tensor, differentiable."""
        logits = self.logit_scale * linear
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
        """Compute log-probs of `targets` (R,) given `hidden` (R, H), fp32, in nats."""
        return linear_logprob(hidden, self.weight, targets, temperature=temperature, **self.options)


def read_head(model: PreTrainedModel) -> Head:
    """Read the head's weight and bias; `verify.check_head` finds out how the model transforms its logits.

    Raises `NotImplementedError` unless the layer is a plain linear one: an adapter on it may be the identity today
    and drift in training.
    """
    layer: Any = model.get_output_embeddings()
    if hasattr(layer, "modules_to_save"):
        layer = layer.original_module if layer.disable_adapters else layer.modules_to_save[layer.active_adapter]
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        raise NotImplementedError(
            f"model: the output layer of {type(model).__name__} is {type(layer).__module__}.{type(layer).__name__}, "
            "not a plain linear layer; leave lm_head out of target_modules, or name it in modules_to_save"
        )
    return Head(layer.weight, layer.bias)
