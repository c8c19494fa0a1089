"""Training with the packed loss under options of TRL's configuration gives the weights of TRL's own."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cfa_kernels import CounterfactualConfig

integration = pytest.importorskip("cfa_kernels.integrations.trl", reason="TRL is not installed", exc_type=ImportError)

from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from tests.support.models import make_model  # noqa: E402
from tests.support.tiny import tiny_model, tiny_tokenizer  # noqa: E402
from tests.support.trl_training import (  # noqa: E402
    experts,
    logged,
    packs,
    parameters,
    rollouts,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), packs]
UNIFORM = CounterfactualConfig(control="off")


def truncated(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Rollouts of which every fourth has no end, a tool's tokens among them."""
    made = rollouts(prompts, trainer)
    for i in range(0, len(prompts), 4):
        for name in ("completion_ids", "logprobs", "env_mask"):
            made[name][i] = made[name][i][:4]
    return made


ACCUMULATED = {"gradient_accumulation_steps": 3}  # rows of three prompts, which TRL shuffles over the micro-batches


@pytest.mark.parametrize(
    "options",
    [
        {"cast_lm_head_to_fp32": True, "multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "batch"},
        {"pad_to_multiple_of": 8, "loss_type": "dr_grpo", "activation_checkpointing": True},
        {"mask_truncated_completions": True, "rollout_func": truncated},
        {"disable_dropout": True, "model": lambda: tiny_model(attention_dropout=0.0)},
        {"num_iterations": 2, "delta": 1.5, "max_steps": 2},
        {"router_aux_loss_coef": 0.0, "model": experts},
        {"model": experts, **ACCUMULATED},  # by default with the loss of its routers
        {"top_entropy_quantile": 0.33, **ACCUMULATED},
        {"use_adaptive_entropy": True, "entropy_coef": 0.5, "entropy_target": 2.987, "max_steps": 3, **ACCUMULATED},
    ],
    ids=" ".join,
)
def test_training_is_trls_under(train, options):
    options = dict(options)
    names = {field.name for field in dataclasses.fields(GRPOConfig)}
    given = {name: options.pop(name) for name in ("rollout_func", "model") if name in options}
    if missing := options.keys() - names:
        pytest.skip(f"this TRL has no {missing}")
    made = given.pop("model", tiny_model)
    settings = {"optim": "sgd", "learning_rate": 0.3} | options
    stock = train(GRPOTrainer, trainer=given | {"model": made()}, **settings)
    ours = train(trainer=given | {"model": made(), "credit": UNIFORM, "packed_loss": True}, **settings)
    start = parameters(SimpleNamespace(model=made()))
    torch.testing.assert_close(parameters(ours), parameters(stock), rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(value, start[name]) for name, value in parameters(stock).items())
    for name in ("loss", "aux_loss", "policy_loss", "entropy_coef"):
        assert logged(ours, name) == pytest.approx(logged(stock, name), rel=1e-4, abs=1e-6), name


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}


def test_old_and_reference_log_probs_have_the_positions_of_the_loss(train, tmp_path):
    """Padding moves learned positions; the policy is the reference here."""
    vocabulary = {"vocab_size": len(tiny_tokenizer()), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    make_model("GPT2", **GPT2 | vocabulary).save_pretrained(tmp_path / "model")
    options = {"beta": 0.3, "num_iterations": 2, "learning_rate": 0.0, "num_generations": 4}
    given = {"model": str(tmp_path / "model"), "credit": None, "packed_loss": True}
    done = train(trainer=given, model_init_kwargs={"dtype": "float32"}, **options)
    assert logged(done, "kl") == pytest.approx([0.0], abs=1e-6)
    assert logged(done, "clip_ratio/region_mean") == [0.0]
