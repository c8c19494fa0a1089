"""`packed_loss=True`: losses and gradients are those of TRL's padded batch, from fewer tokens."""

from typing import Any

import pytest
import torch

from cfa_kernels import CounterfactualConfig
from cfa_kernels.losses import LEVELS, LOSS_TYPES
from tests.tiny import tiny_model

pytest.importorskip("cfa_kernels.integrations.trl", reason="TRL is not installed", exc_type=ImportError)

from datasets import Dataset
from peft import get_peft_model

from cfa_kernels.integrations.trl import CounterfactualGRPOTrainer
from cfa_kernels.integrations.trl_losses import prompts_together
from tests.integrations.trl_training import (
    LORA,
    PROMPT,
    RELEASE,
    build,
    changed,
    fuses,
    logged,
    parameters,
    rollouts,
    seven,
    texts,
    with_vllm,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), fuses]
UNIFORM = CounterfactualConfig(mode="uniform")
PROMPT_LENGTHS, LENGTHS = [6, 6, 6, 6, 3, 3, 3, 3], [5, 9, 7, 9, 1, 8, 0, 4]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Any, Any]:
    """A trainer with TRL's own loss and one with the packed loss, of equal models; ready to compute a loss."""
    made = []
    for packed in (False, True):
        folder = str(tmp_path_factory.mktemp("run"))
        trainer = build(folder, trainer={"counterfactual": UNIFORM, "packed_loss": packed}, max_completion_length=12)
        trainer.current_gradient_accumulation_steps = 2
        made.append(trainer)
    return made[0], made[1]


def noise(seed: int, low: float, high: float, *shape: int) -> torch.Tensor:
    return torch.empty(shape or (8, 9)).uniform_(low, high, generator=torch.Generator().manual_seed(seed))


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
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask,
        "completion_ids": completions,
        "completion_mask": mask,
        "tool_mask": tools,
        "advantages": noise(2, -1.0, 1.0, 8)[:, None] * weights,
        "num_items_in_batch": (mask * tools).sum(),
        "old_per_token_logps": noise(3, -4.5, -1.5),
        "ref_per_token_logps": noise(4, -4.5, -1.5),
        "importance_sampling_ratio": noise(5, 0.0, 2.0),
    }


def loss_and_gradients(trainer: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    trainer.model.train().zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


def assert_equal(pair: tuple[Any, Any], inputs: dict[str, Any]) -> None:
    (plain, theirs), (packed, ours) = (loss_and_gradients(trainer, inputs) for trainer in pair)
    torch.testing.assert_close(packed, plain, rtol=1e-5, atol=1e-6)
    largest = max(gradient.norm() for gradient in theirs.values())
    assert largest > 0
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * max(gradient.norm(), 0.1 * largest), name
    for metric in ("entropy", "kl", "clip_ratio/region_mean", "cispo_clip_ratio"):
        values = [trainer._metrics["train"].pop(metric, []) for trainer in pair]
        assert values[1] == pytest.approx(values[0], rel=1e-4, abs=1e-6), metric


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_and_gradients_are_those_of_trls_padded_batch(pair, monkeypatch, loss_type, level):
    for trainer in pair:
        monkeypatch.setattr(trainer, "loss_type", loss_type)
        monkeypatch.setattr(trainer, "importance_sampling_level", level)
    inputs = batch()
    if level == "sequence":  # one advantage and one ratio for each, as TRL has them there
        inputs["advantages"] = noise(2, -1.0, 1.0, 8)
    assert_equal(pair, inputs)


@pytest.mark.parametrize(
    "changes",
    [
        {"beta": 0.1},
        {"temperature": 0.7},
        {"epsilon_low": 0.01, "epsilon_high": 3.0},
        {"use_vllm": True, "vllm_importance_sampling_correction": True},
        {"args.delta": 1.5},
    ],
    ids=str,
)
def test_so_they_are_with_the_settings_of_trls_loss(tmp_path, changes):
    made = []
    for packed in (False, True):
        given = {"counterfactual": UNIFORM, "packed_loss": packed}
        options = {"temperature": changes["temperature"]} if "temperature" in changes else {}
        trainer = build(str(tmp_path), trainer=given, max_completion_length=12, **options)
        trainer.current_gradient_accumulation_steps = 2
        for name, value in changes.items():
            setattr(trainer.args if name.startswith("args.") else trainer, name.removeprefix("args."), value)
        made.append(trainer)
    inputs = batch()
    if "use_vllm" not in changes:
        del inputs["importance_sampling_ratio"]
    assert_equal((made[0], made[1]), inputs)


def test_on_policy_the_current_logprobs_are_the_old_ones(pair):
    assert_equal(pair, {name: value for name, value in batch().items() if name != "old_per_token_logps"})
