"""`fused_loss=True`: the loss from hidden states trains as TRL's own loss does, on the same rollouts and weights."""

from typing import Any

import pytest
import torch

from cfa_kernels import CounterfactualConfig
from tests.support.tiny import PHRASES, WORDS, tiny_model

pytest.importorskip("cfa_kernels.integrations.trl", reason="TRL is not installed", exc_type=ImportError)

from datasets import Dataset
from transformers import GraniteConfig, GraniteForCausalLM

from tests.support.trl_training import LORA, PROMPT, fuses, logged, parameters, rollouts

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), fuses]


def train_both(train: Any, **options: Any) -> tuple[Any, Any]:
    """The trainer with TRL's loss, and the one with the fused loss."""
    given = options.pop("trainer", {})
    return tuple(train(trainer=given | {"fused_loss": fused}, **options) for fused in (False, True))


def assert_trained_alike(plain: Any, fused: Any) -> None:
    for name, value in parameters(fused).items():
        torch.testing.assert_close(value, parameters(plain)[name], rtol=2e-3, atol=2e-4, msg=name)
    for name in ("loss", "grad_norm", "entropy", "kl", "clip_ratio/region_mean", "clip_ratio/high_max"):
        assert logged(fused, name) == pytest.approx(logged(plain, name), rel=1e-3, abs=1e-4), name
    assert max(logged(fused, "grad_norm")) > 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"trainer": {"counterfactual": CounterfactualConfig(mode="uniform")}},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "cispo", "epsilon_high": 1.2, "num_iterations": 2, "max_steps": 2},
        {"loss_type": "bnpo", "epsilon": 0.01, "delta": 1.02, "num_iterations": 3, "max_steps": 3},
        {"loss_type": "dr_grpo", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
        {
            "loss_type": "dapo", "steps_per_generation": 4, "per_device_train_batch_size": 4, "num_iterations": 2,
            "max_steps": 2,
        },
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "sapo", "temperature": 0.7, "gradient_checkpointing": True},
        {"trainer": {"peft_config": LORA}, "beta": 0.1, "num_iterations": 2, "max_steps": 2},
        {"trainer": {"rollout_func": rollouts}},
    ],
    ids=lambda options: "-".join(map(str, options)) or "as it comes",
)  # fmt: skip
def test_the_fused_loss_trains_as_trls_own_with_the_same_weights(train, options):
    assert_trained_alike(*train_both(train, **options))


def granite() -> GraniteForCausalLM:
    """A model that divides its logits."""
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=len(WORDS) + len(PHRASES), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, tie_word_embeddings=False, logits_scaling=0.5,
    )  # fmt: skip
    return GraniteForCausalLM(config)


def test_the_fused_loss_scales_logits_as_the_model_does(train):
    plain, fused = (
        train(trainer={"model": granite(), "fused_loss": fused}, temperature=0.7) for fused in (False, True)
    )
    assert_trained_alike(plain, fused)


def test_the_fused_loss_takes_a_head_in_float32_on_a_model_in_bfloat16(train, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    plain, fused = train_both(
        train, trainer={"model": str(tmp_path / "model")}, cast_lm_head_to_fp32=True,
        model_init_kwargs={"dtype": "bfloat16"},
    )  # fmt: skip
    assert {value.dtype for value in parameters(fused).values()} == {torch.float32, torch.bfloat16}
    for name in ("loss", "grad_norm", "entropy"):
        assert logged(fused, name) == pytest.approx(logged(plain, name), rel=1e-2, abs=1e-4), name


def test_the_fused_loss_makes_no_logits_and_evaluates_too(train, monkeypatch):
    head = torch.nn.Linear.forward
    wide: list[Any] = []

    def watched(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.out_features == len(WORDS) + len(PHRASES) and torch.is_grad_enabled():
            wide.append(x.shape)
        return head(self, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", watched)
    trained = train(
        eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8,
        trainer={"fused_loss": True, "eval_dataset": Dataset.from_dict({"prompt": [PROMPT] * 2})},
    )  # fmt: skip
    assert wide == []
    assert logged(trained, "eval_loss")


def test_the_fused_loss_without_the_entropy_trains_the_same(train):
    with_entropy, without = (
        train(trainer={"fused_loss": True, "log_entropy": log}, optim="sgd") for log in (True, False)
    )
    for name, value in parameters(without).items():
        torch.testing.assert_close(value, parameters(with_entropy)[name], rtol=1e-4, atol=1e-6, msg=name)
    assert logged(without, "loss") == pytest.approx(logged(with_entropy, "loss"), rel=1e-4)
    assert logged(with_entropy, "entropy")
    assert not logged(without, "entropy")
