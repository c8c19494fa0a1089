"""A small batch with every feature of the policy loss, the losses on it, and the same maths as a user would write."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cfa_kernels.loss.options import CORRECTIONS, KL_ESTIMATORS
from cfa_kernels.loss.policy import linear_policy_loss, logits_policy_loss, policy_loss
from cfa_kernels.loss.types import LOSS_TYPES

B, T, V, H = 3, 4, 37, 24

LENGTHS = torch.tensor([4, 2, 3])
COUNTED = 9

FEATURES: dict[str, dict[str, Any]] = {
    "low-delta": {"delta": 1.02, "token_advantages": True},
    "k1": {"beta": 0.1, "kl_estimator": "k1"},
    "entropy": {"entropy_coef": 0.2, "temperature": 0.7},
    "softcap": {"softcap": 4.0, "temperature": 1.5, "logit_scale": 0.7, "weights": True},
    "band": {"correction": "token_mask", "sampling_clip_max": 1.1, "sampling_clip_min": 0.85, "weights": True},
    "all": {
        "correction": "token_truncate", "sampling_clip_max": 1.1, "weights": True,
        "delta": 1.4, "beta": 0.1, "entropy_coef": 0.2, "temperature": 0.8, "softcap": 6.0, "token_advantages": True,
    },
}  # fmt: skip


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(
    dtype: torch.dtype = torch.float64, device: Any = "cpu", *, b: int = B, t: int = T, v: int = V, **features: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors, all exact in `dtype`, and keyword options. Ratios keep clear of the clips' edges.

    `hidden @ head.T + bias` has logits of standard deviation about 2.
    """
    hidden, head = normal(b, t, H, seed=0), 2 * normal(v, H, seed=1) / math.sqrt(H)
    tensors: dict[str, Any] = {"hidden": hidden, "head": head, "bias": normal(v, seed=2)}
    tensors = {name: tensor.to(dtype).to(device) for name, tensor in tensors.items()}
    exact = [tensors[name].double() for name in ("hidden", "head", "bias")]
    z = exact[0] @ exact[1].T + exact[2]
    logits = z.to(dtype)
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(v, (b, t), generator=generator)
    targets[0, 0], targets[-1, 0] = 0, v - 1
    cap, temperature = features.get("softcap"), features.get("temperature", 1.0)
    z = z * features.get("logit_scale", 1.0)
    z = z if cap is None else cap * torch.tanh(z / cap)
    logprobs = (z / temperature).log_softmax(-1).gather(-1, targets.to(device)[..., None])[..., 0]
    shifts = torch.tensor([-0.6, 0.6, 0.05, -0.05], dtype=torch.float64).repeat(b, t)[:, :t]
    shifts[1::2] *= -1  # both signs of the advantage meet ratios below, inside and above the clip
    advantages = torch.tensor([1.0, -0.8, 0.5, -1.2, 0.0] * b, dtype=torch.float64)[:b]
    lengths = LENGTHS.repeat(b)[:b].clamp(max=t)
    tensors |= {
        "logits": logits,
        "targets": targets.to(device),
        "old": logprobs - shifts.to(device) if features.get("old", True) else None,
        "advantages": (normal(b, t, seed=8) if features.get("token_advantages") else advantages).to(device),
        "mask": (torch.arange(t) < lengths[:, None]).to(device),
    }
    of_tensors = ("old", "weights", "token_advantages", "correction")
    options = {name: value for name, value in features.items() if name not in of_tensors}
    options["max_completion_length"] = 7
    if features.get("weights"):
        kept = torch.rand(b, t, generator=generator) > 0.2
        options["weights"] = (3 * torch.rand(b, t, generator=generator) * kept).to(device)
    if any(features.get(name) is not None for name in ("correction", "off_policy_mask_threshold")):
        options["sampling_mode"] = features.get("correction")
        options["sampling_logprobs"] = (logprobs + 0.1 * normal(b, t, seed=11).to(device)).index_fill(
            1, torch.tensor([1], device=logprobs.device), math.nan
        )
    if features.get("beta"):
        options["ref_logprobs"] = logprobs + 0.3 * normal(b, t, seed=6).to(device)
    return tensors, options


def unchecked(options: dict[str, Any]) -> dict[str, Any]:
    """Let weights differ within a sequence at its level, which losses refuse where they check values.

    Corrections there are the sequence's, and those of vespo are the tokens', since the losses take no others.
    """
    at_sequence, mode = options.get("importance_sampling_level") == "sequence", options.get("sampling_mode")
    if mode and at_sequence:
        options = options | {"sampling_mode": mode.replace("token", "sequence")}
    elif mode and options.get("loss_type") == "vespo":
        options = options | {"sampling_mode": f"token_{mode.partition('_')[2]}"}
    return {"validate": False} | options if at_sequence else options


KINDS = [(loss_type, level) for loss_type, kind in LOSS_TYPES.items() for level in kind.levels]
KIND = pytest.mark.parametrize(("loss_type", "level"), KINDS)
"""Every loss type at each of its levels."""
OF_TRL = [
    kind
    for kind in KINDS
    if kind[0] not in ("cispo_two_sided", "dppo", "ipo", "reinforce") and kind[1] != "sequence_token"
]
"""Those that TRL has, its GMPO trainer's among them."""


def drawn_features(seed: int, loss_type: str, level: str) -> dict[str, Any]:
    """Draw every option of the losses, and every input of `problem`, on its own, but what is refused together."""
    draw = random.Random(f"{seed}, {loss_type}, {level}")
    allowed = "sequence geometric" if level == "sequence" else "token" if loss_type == "vespo" else "token sequence geo"
    modes = [mode for mode in CORRECTIONS if mode.startswith(tuple(allowed.split()))]
    usual = {
        "old": (True, False), "weights": (True, False), "token_advantages": (True, False),
        "epsilon": (0.2, 0.05), "epsilon_high": (0.28, 0.07, 1.4), "delta": (None, 1.4, 1.02),
        "beta": (0.0, 0.1), "kl_estimator": KL_ESTIMATORS, "use_bias_correction_kl": (False, True),
        "num_items_in_batch": (None, 23), "num_sequences_in_batch": (None, 5),
        "sapo_temperature_pos": (1.0, 2.0), "sapo_temperature_neg": (1.05, 0.5), "vespo_k_pos": (2.0, 1.5),
        "vespo_lambda_pos": (3.0, 1.0), "vespo_k_neg": (3.0, 0.5), "vespo_lambda_neg": (2.0, 0.7),
        "entropy_coef": (0.0, 0.2), "temperature": (1.0, 0.7), "softcap": (None, 4.0), "logit_scale": (1.0, 0.7),
        "off_policy_mask_threshold": (None, 0.02), "correction": (None, *modes),
        "sampling_clip_min": (None, 0.9), "sampling_clip_max": (None, 1.1),
    }  # fmt: skip
    features = {name: draw.choice(values) for name, values in usual.items()}
    if features["correction"] is None:  # bounds are refused without it
        features |= {"sampling_clip_min": None, "sampling_clip_max": None}
    return features | {"loss_type": loss_type, "importance_sampling_level": level}


def others(tensors: dict[str, Any]) -> tuple[Any, ...]:
    return tensors["targets"], tensors["old"], tensors["advantages"], tensors["mask"]


def of_logits(tensors: dict[str, Any], **options: Any) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    logits = tensors["logits"].detach().clone()
    if logits.is_floating_point():
        logits.requires_grad_()
    loss, metrics = logits_policy_loss(logits, *others(tensors), **unchecked(options))
    loss.backward()
    return loss.detach(), [logits.grad], metrics


def of_hidden(
    tensors: dict[str, Any], *, with_bias: bool = True, alone: bool = False, **options: Any
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Loss, gradients and metrics of `linear_policy_loss`; `alone` hands over the states of `rows` only."""
    names = ("hidden", "head", "bias") if with_bias else ("hidden", "head")
    leaves = {name: tensors[name] for name in names}
    leaves |= {name: x.detach().clone().requires_grad_() for name, x in leaves.items() if isinstance(x, Tensor)}
    hidden = leaves["hidden"].flatten(0, 1)[options["rows"]] if alone else leaves["hidden"]
    bias, options = leaves.get("bias"), unchecked(options)
    loss, metrics = linear_policy_loss(hidden, leaves["head"], *others(tensors), bias=bias, **options)
    loss.backward()
    return loss.detach(), [leaf.grad for leaf in leaves.values()], metrics


def plain(
    tensors: dict[str, Any], form: Callable[..., Any], dtype: torch.dtype, *, temperature: float = 1.0,
    softcap: float | None = None, logit_scale: float = 1.0, entropy_coef: float = 0.0, **options: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:  # fmt: skip
    """The same maths as a user would write it: logits in `dtype`, log_softmax in float32 or better, autograd."""
    leaves = [tensors[name].detach().to(dtype).requires_grad_() for name in leaves_of(form)]
    logits = leaves[0] if form is of_logits else leaves[0] @ leaves[1].T + leaves[2]
    logits = logit_scale * logits.to(torch.promote_types(dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = (logits / temperature).log_softmax(-1)
    mask = tensors["mask"]
    chosen = logp.gather(-1, torch.where(mask, tensors["targets"], 0)[..., None])[..., 0]
    entropies = -(logp.exp() * logp).sum(-1)
    loss, metrics = policy_loss(
        chosen, tensors["old"], tensors["advantages"], mask, entropies=entropies, entropy_coef=entropy_coef,
        **unchecked(options),
    )  # fmt: skip
    loss.backward()
    return loss.detach(), [leaf.grad for leaf in leaves], metrics


def loss_and_gradient(logprobs, *args, **options):
    logprobs = logprobs.detach().clone().requires_grad_()
    loss, metrics = policy_loss(logprobs, *args, **options)
    loss.backward()
    return loss.detach(), logprobs.grad, metrics


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(test))


FORM = pytest.mark.parametrize("form", [of_logits, of_hidden])


def leaves_of(form: Callable[..., Any]) -> tuple[str, ...]:
    return ("logits",) if form is of_logits else ("hidden", "head", "bias")


def assert_same(ours, expected, **tolerance):
    torch.testing.assert_close(ours[0], expected[0], **tolerance)
    torch.testing.assert_close(ours[1], expected[1], **tolerance)
