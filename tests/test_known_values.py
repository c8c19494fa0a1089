"""Scores, losses, gradients and credit of fixed batches are those of `known_values.json`.

NumPy's frozen generator draws inputs and weights, in float64. A tensor becomes two numbers: its norm, and its sum with
factors that differ by position, so that neither order nor sign can change unseen. `python -m tests.test_known_values`
writes the file anew after an intended change.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cfa_kernels import (
    CounterfactualConfig,
    Rows,
    counterfactual_credit,
    linear_policy_loss,
    packed_policy_loss,
    policy_loss,
    score_counterfactuals,
)
from cfa_kernels.credit.weights import WEIGHTS
from cfa_kernels.estimators import ESTIMATORS
from cfa_kernels.loss.types import LOSS_TYPES
from tests.support.models import DELTA, MLA, PLACEHOLDER, VOCAB, batch, make_model
from tests.support.plug_ins import RESAMPLING, TOTAL_EFFECTS
from tests.support.tiny import PHRASES, WORDS, tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.traced]  # all is on the host: nothing to tell apart

FILE = Path(__file__).parent / "support" / "known_values.json"
DIGITS = 7  # the same on every machine
TOLERANCE = 1e-4  # of a tensor's norm: some layers and weights are computed in float32 whatever the model's dtype

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "full attention": ("Llama", {}),
    "window": ("Mistral", {}),
    "MLA": ("DeepseekV3", {**MLA, "num_key_value_heads": 4, "first_k_dense_replace": 3}),
    "hybrid": ("Qwen3Next", {**DELTA, "num_experts": 0, "mlp_only_layers": [0, 1, 2, 3]}),
}
OUTCOMES = ("logprob", "mean_logprob", "last", "mean")
SUMS = ("dapo", "grpo", "bnpo", "dr_grpo")

CF_PAPER = {"spans.selection": "first", "answers.lead_in": "statement", "weights.min_spread": 0.0}
CREDIT: dict[str, dict[str, Any]] = {
    "default": {}, "CF paper": CF_PAPER, "CF paper, mean": CF_PAPER | {"normalize": "mean"},
    "CF paper, sentences": CF_PAPER | {"spans.detector": "sentence"}, "inverted": {"control": "inverted"},
    "random": {"control": "random"}, "off": {"control": "off"}, "mean": {"normalize": "mean"},
    "bilevel": {"weights": "bilevel"}, "top": {"weights": "top", "weights.fraction": 0.3},
    "longest spans": {"spans.max_spans": 2, "spans.selection": "longest"}, "sentences": {"spans.detector": "sentence"},
    "OAR-P": {"units": "tokens", "estimator.outcome": "mean", "weights": "bilevel"}, "OAR-G": {"estimator": "gradient"},
    "OAR-G, no noise": {"estimator": "gradient", "estimator.sigma": 0.0},
    "OAR-G, spans": {"estimator": "gradient", "units": "spans", "weights": "range", "estimator.samples": 3},
    "prefix gain": {"estimator": "prefix_gain"}, "entropy": {"estimator": "entropy"},
    "entropy shaping": {"estimator": "entropy_shaping"}, "prefix tree": {"estimator": "prefix_tree"},
    "sibling edits": {"estimator": "sibling_edits"},
    "sibling edits, inverted": {"estimator": "sibling_edits", "control": "inverted", "weights": "range"},
    "external": {"estimator": "external", "units": "tokens", "weights": "bilevel"}, "total effect": TOTAL_EFFECTS,
    "resampled": {**RESAMPLING, "estimator.samples": 2}, "preselected": {"estimator.preselect": 0.5},
    "preselected by gain": {"estimator.preselect": 0.5, "estimator.preselect_by": "prefix_gain"},
    "redistributed": {"weights": "redistribute", "weights.strength": 1.5}, "progress": {"estimator": "progress"},
    "gate of signs": {"weights": "sign_gate"},
    "turns": {"units": "turns", "estimator.mask_observation": True},
}  # fmt: skip


def figures() -> dict[str, list[float]]:
    """Compute every figure: by its name, norm and position-weighted sum of each tensor of a case."""
    return {name: [x for tensor in tensors for x in _summary(tensor)] for name, tensors in _cases()}


def _summary(tensor: Tensor) -> tuple[float, float]:
    x = tensor.detach().double().flatten().nan_to_num(nan=-7.0)
    return x.norm().item(), (x * torch.cos(torch.arange(1.0, len(x) + 1, dtype=torch.float64))).sum().item()


def _draw(seed: int, *shape: int, low: float = -1.0, high: float = 1.0) -> Tensor:
    return torch.from_numpy(np.random.RandomState(seed).uniform(low, high, shape))


def _fixed(model: torch.nn.Module) -> Any:
    for seed, parameter in enumerate(model.parameters()):
        centre, half = (1.0, 0.3) if parameter.ndim == 1 else (0.0, 0.35)
        parameter.data = centre + half * _draw(seed, *parameter.shape)
    return model.double().eval()


def _gradients(model: torch.nn.Module, loss: Tensor) -> Tensor:
    result = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([x.flatten() for x in result if x is not None])


def _cases() -> Iterator[tuple[str, Iterable[Tensor]]]:
    for name, (kind, changes) in MODELS.items():
        yield from _of_model(name, _fixed(make_model(kind, **changes).cpu()))
    yield from _of_losses()
    yield from _of_credit()


def _of_model(name: str, model: Any) -> Iterator[tuple[str, Iterable[Tensor]]]:
    prompts, completions, spans, answers = batch()
    for outcome in OUTCOMES if name == "full attention" else OUTCOMES[:1]:
        scores = score_counterfactuals(
            model, Rows(prompts, completions), spans, answers, mask=PLACEHOLDER, outcome=outcome
        )
        yield f"scores, {name}, {outcome}", (scores.base, torch.cat(scores.drop))
    advantages = torch.tensor([1.0, -1.0, 0.5, 0.0, -0.25, 2.0, 1.0])
    weights = [_draw(90 + b, len(row), low=0, high=2).float() for b, row in enumerate(completions)]
    old = [_draw(70 + b, len(row), low=-8, high=-2).float() for b, row in enumerate(completions)]
    for loss_type in SUMS if name == "full attention" else SUMS[:1]:
        packed = packed_policy_loss(
            model, Rows(prompts, completions), old_logprobs=old, advantages=advantages, weights=weights,
            loss_type=loss_type, max_completion_length=50, temperature=0.7, compute_entropy=True,
        )  # fmt: skip
        metrics = torch.stack([torch.as_tensor(packed.metrics[key]).double() for key in sorted(packed.metrics)])
        yield (
            f"packed loss, {name}, {loss_type}",
            (packed.loss, metrics, torch.cat(packed.logprobs), _gradients(model, packed.loss)),
        )


def _of_losses() -> Iterator[tuple[str, Iterable[Tensor]]]:
    n, t, h = 5, 9, 16
    hidden, head = _draw(1, n, t, h).requires_grad_(), (2 * _draw(2, VOCAB, h)).requires_grad_()
    targets = torch.from_numpy(np.random.RandomState(3).randint(VOCAB, size=(n, t)))
    mask, advantages = _draw(4, n, t) > -0.6, 2 * _draw(5, n)
    logprobs = ((hidden @ head.T) / 0.9).log_softmax(-1).gather(-1, targets[..., None])[..., 0].detach()
    logprobs.requires_grad_()
    old, reference = logprobs.detach() + 0.5 * _draw(6, n, t), logprobs.detach() + _draw(7, n, t)
    for loss_type, kind in LOSS_TYPES.items():
        for level in kind.levels:
            for beta in (0.0, 0.04):
                options: Any = {
                    "loss_type": loss_type, "importance_sampling_level": level, "beta": beta, "ref_logprobs": reference,
                    "weights": _draw(8, n, t, low=0, high=2), "max_completion_length": 25, "delta": 1.6,
                    "validate": False,  # weights that differ within a sequence are refused where values are checked
                }  # fmt: skip
                if loss_type in ("cispo", "sapo"):
                    del options["delta"]
                loss, _ = policy_loss(logprobs, old, advantages, mask, **options)
                name = f"{loss_type}, {level}, beta {beta:g}"
                yield f"loss, {name}", (loss, *torch.autograd.grad(loss, [logprobs]))
                if beta:
                    loss, _ = linear_policy_loss(
                        hidden, head, targets, old, advantages, mask, temperature=0.9, **options
                    )
                    yield f"loss of hidden states, {name}", (loss, *torch.autograd.grad(loss, [hidden, head]))


def _of_credit() -> Iterator[tuple[str, Iterable[Tensor]]]:
    model, tokenizer, random = _fixed(tiny_model()), tiny_tokenizer(), np.random.RandomState(9)
    n, t, eos, first = 12, 24, 1, len(WORDS)
    prompts = torch.from_numpy(random.randint(3, 12, size=(3, 6))).repeat_interleave(4, 0)
    completions = torch.from_numpy(random.randint(first, first + len(PHRASES) - 2, size=(n, t)))
    mask = torch.zeros(n, t, dtype=torch.long)
    for b, length in enumerate(random.randint(8, t - 1, size=n)):
        completions[b, length - 1] = first + len(PHRASES) - 1 - b % 2  # an answer, then the end
        completions[b, length], completions[b, length + 1 :] = eos, 0
        mask[b, : length + 1] = 1
    known = {
        "advantages": 2 * _draw(10, n).float(),
        "rewards": torch.tensor([1.0, 0.0, 1.0, 0.0] * 3),
        "entropies": [row[:k] for row, k in zip(_draw(11, n, t, low=0, high=1).float(), mask.sum(1), strict=True)],
    }
    external = [_draw(20 + b, int(mask[b].sum()), low=0, high=1).float() for b in range(n)]
    rows = Rows.from_padded(prompts, torch.ones_like(prompts), completions, mask)
    turns: dict[str, Any] = {"mask": [(torch.arange(k) % 5 != 2) | (torch.arange(k) > k - 4) for k in rows.lengths]}
    for seed, name in enumerate(("old_logprobs", "ref_logprobs"), 40):
        turns[name] = [-_draw(seed + b, k, low=0, high=1).float() for b, k in enumerate(rows.lengths)]
    for name, options in CREDIT.items():
        config = CounterfactualConfig.of(options)
        credit = counterfactual_credit(
            model, tokenizer, rows, config=config, seed=3, external=external if name == "external" else None,
            **known, **(turns if config.units == "turns" else {}),
        )  # fmt: skip
        signed = None if credit.advantages is None else (credit.advantages, known["advantages"])
        columns = [credit.padded(t), credit.base, torch.cat(credit.drop), signed and _padded(*signed, t)]
        yield f"credit, {name}", [x for x in columns if x is not None]


def _padded(rows: list[Tensor], fill: Tensor, width: int) -> Tensor:
    return torch.stack([torch.cat([row, x.expand(width - len(row))]) for row, x in zip(rows, fill, strict=True)])


def test_figures_of_fixed_batches_are_the_known_ones():
    actual, known = figures(), json.loads(FILE.read_text())
    assert actual.keys() == known.keys(), "write them anew: python -m tests.test_known_values"
    for name, expected in known.items():
        assert len(actual[name]) == len(expected), name
        pairs = list(zip(actual[name], expected, strict=True))
        for norm, total in zip(pairs[::2], pairs[1::2], strict=True):
            allowed = TOLERANCE * abs(norm[1]) + 1e-9
            assert abs(norm[0] - norm[1]) <= allowed, f"{name}: norm {norm[0]}, known {norm[1]}"
            assert abs(total[0] - total[1]) <= allowed, f"{name}: sum by position {total[0]}, known {total[1]}"


def test_every_estimator_and_weight_rule_has_known_figures():
    configs = [CounterfactualConfig.of(options) for options in CREDIT.values()]
    fix = "give it a case in CREDIT, and write the file anew: python -m tests.test_known_values"
    assert {config.estimator.name for config in configs} >= ESTIMATORS.keys(), fix
    assert {type(config.weights) for config in configs} >= {*WEIGHTS.values()}, fix


if __name__ == "__main__":
    lines = (
        f"{json.dumps(name)}: {json.dumps([float(f'{x:.{DIGITS}g}') for x in numbers])}"
        for name, numbers in figures().items()
    )
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
