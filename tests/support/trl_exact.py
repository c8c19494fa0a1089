"""TRL's padded loss in float64 and the packed one, of equal models on one batch."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cfa_kernels.integrations.trl", reason="TRL is not installed", exc_type=ImportError)

from trl import GRPOTrainer

from cfa_kernels import CounterfactualConfig
from tests.support.models import assert_same_gradients, make_model
from tests.support.trl_training import build

UNIFORM = CounterfactualConfig(control="off")
PROMPT_LENGTHS, LENGTHS = [6, 6, 6, 6, 3, 3, 3, 3], [5, 9, 7, 9, 1, 8, 0, 4]


class Exact(GRPOTrainer):
    """TRL's, whose padded forward keeps float64, and counts positions from the first token as in sampling."""

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: Any, mask: Any, count: int, compute_aux_loss: bool, **_: Any
    ) -> Any:
        routers = {"output_router_logits": True} if compute_aux_loss else {}
        output = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), **routers)
        logprobs = (output.logits[:, -count - 1 : -1] / self.temperature).log_softmax(-1)
        own = logprobs.gather(-1, ids[:, -count:, None])[..., 0]
        return own, -(logprobs.exp() * logprobs).sum(-1), getattr(output, "aux_loss", None)


def in_float64() -> Any:
    """A model whose norms keep float64, as those of most others do not."""
    return make_model("StableLm", num_hidden_layers=2)


def both(folder: Path, model: Any = in_float64, kind: type = Exact, **options: Any) -> tuple[Any, Any]:
    """A trainer with TRL's own loss and one with the packed loss, of equal models; ready to compute a loss."""
    options |= {"max_completion_length": 12}
    arguments = {"credit": UNIFORM, "packed_loss": True}
    plain = build(str(folder), kind, trainer={"model": model()}, **options)
    packed = build(str(folder), trainer=arguments | {"model": model()}, **options)
    for trainer in (plain, packed):
        trainer.model.double()
    plain.current_gradient_accumulation_steps = packed.current_gradient_accumulation_steps = 2
    return plain, packed


def noise(seed: int, low: float, high: float, *shape: int) -> torch.Tensor:
    return torch.empty(shape or (8, 9), dtype=torch.float64).uniform_(
        low, high, generator=torch.Generator().manual_seed(seed)
    )


def batch() -> dict[str, Any]:
    """Two prompts of four completions as TRL lays them out; one is masked out altogether, one holds a tool's tokens."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 20, (2, 6), generator=generator).repeat_interleave(4, 0)
    completions = torch.randint(3, 20, (8, 9), generator=generator)
    completions[1, :5] = completions[3, :5]  # a common beginning
    prompt_mask = (torch.arange(6) >= 6 - torch.tensor(PROMPT_LENGTHS)[:, None]).long()
    mask = (torch.arange(9) < torch.tensor(LENGTHS)[:, None]).long()
    weights = noise(1, 0.0, 3.0)
    weights[2] = 0.0
    tools = torch.ones(8, 9, dtype=torch.long)
    tools[3, 2:4] = 0
    return {
        "prompt_ids": prompts, "prompt_mask": prompt_mask, "completion_ids": completions, "completion_mask": mask,
        "tool_mask": tools, "advantages": noise(2, -1.0, 1.0, 8)[:, None] * weights,
        "num_items_in_batch": (mask * tools).sum(), "old_per_token_logps": noise(3, -4.5, -1.5),
    }  # fmt: skip


def loss_and_gradients(trainer: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    trainer.model.train().zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


def assert_equal(pair: tuple[Any, Any], inputs: dict[str, Any], tolerance: float = 1e-7) -> None:
    """Losses, gradients and TRL's metrics; what is divided by counts of tokens is rounded to float32 there."""
    for trainer in pair:
        trainer._metrics["train"].clear()
    (plain, theirs), (packed, ours) = (loss_and_gradients(trainer, inputs) for trainer in pair)
    torch.testing.assert_close(packed, plain, rtol=tolerance, atol=tolerance)
    assert_same_gradients(ours, theirs, tolerance)
    expected, logged = (trainer._metrics["train"] for trainer in pair)
    for metric, values in expected.items():
        if metric == "vespo/phi_seq_mean" or (pair[0].off_policy_mask_threshold and metric.startswith("clip_ratio")):
            continue  # of the sequences that have an advantage, of the tokens that the mask leaves
        assert logged[metric] == pytest.approx(values, rel=1e-6, abs=1e-7), metric
    assert all(name in expected or name.startswith(("packed/", "sampling/")) for name in logged)
