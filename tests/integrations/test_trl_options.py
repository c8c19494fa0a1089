"""Every option of TRL's configuration: the losses give what TRL's gives, refuse it, or are not touched by it."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cfa_kernels import CounterfactualConfig

integration = pytest.importorskip("cfa_kernels.integrations.trl", reason="TRL is not installed", exc_type=ImportError)

from accelerate import PartialState  # noqa: E402
from transformers import TrainerCallback, TrainingArguments  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.trainer import grpo_trainer  # noqa: E402

from tests.support.models import make_model  # noqa: E402
from tests.support.tiny import tiny_model, tiny_tokenizer  # noqa: E402
from tests.support.trl_training import (  # noqa: E402
    build,
    experts,
    logged,
    packs,
    parameters,
    rollouts,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), packs]
UNIFORM = CounterfactualConfig(control="off")

# Tests compare losses with TRL's under these: here, in test_trl_packed.py, test_policy_trl.py.
EQUAL = {
    "beta", "cast_lm_head_to_fp32", "delta", "disable_dropout", "entropy_coef", "entropy_coef_delta",
    "entropy_coef_max", "entropy_coef_min", "entropy_target", "epsilon", "epsilon_high",
    "importance_sampling_level", "loss_type", "mask_truncated_completions", "max_completion_length", "num_iterations",
    "off_policy_mask_threshold", "pad_to_multiple_of",
    "router_aux_loss_coef", "sapo_temperature_neg", "sapo_temperature_pos", "steps_per_generation", "temperature",
    "top_entropy_quantile", "use_adaptive_entropy", "use_bias_correction_kl", "vespo_k_neg", "vespo_k_pos",
    "vespo_lambda_neg", "vespo_lambda_pos", "vllm_importance_sampling_correction",
}  # fmt: skip
REFUSED = {"ds3_gather_for_generation"}  # by name
# TRL has used these up before the loss is asked for: sampling, rewards, advantages, the reference, ratios, the log.
BEFORE = {
    "cache_implementation", "chat_template_kwargs", "generation_batch_size", "generation_kwargs", "log_completions",
    "log_completions_hub_repo", "log_multimodal", "log_unique_prompts", "max_tool_calling_iterations", "min_p",
    "model_init_kwargs", "multi_objective_aggregation", "num_completions_to_print", "num_generations",
    "num_generations_eval", "ref_model_mixup_alpha", "ref_model_sync_steps", "repetition_penalty", "reward_weights",
    "scale_rewards", "shuffle_dataset", "sync_ref_model", "top_k", "top_p", "transformers_continuous_batching_config",
    "trust_remote_code", "use_transformers_continuous_batching", "use_transformers_paged", "use_vllm",
}  # fmt: skip


def test_every_option_of_trl_is_judged():
    """A new field of `GRPOConfig` fails here until somebody has looked at what it does to the loss."""
    assert not EQUAL & REFUSED
    assert not (EQUAL | REFUSED) & BEFORE
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    own = {field.name for field in dataclasses.fields(GRPOConfig)} - inherited
    sampling = {name for name in own if name.startswith("vllm_") and name not in EQUAL}
    assert own - sampling - EQUAL - REFUSED - BEFORE == set()


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


def test_noise_and_dropout_of_training_have_no_part_in_credit(train):
    """`entropy` asks the model in training, as TRL leaves it, and reads what the other estimators would."""
    given = {"credit": CounterfactualConfig(estimator="entropy"), "rollout_func": rollouts}
    plain = train(trainer=given)
    for noisy in ({"neftune_noise_alpha": 5.0}, {"model": tiny_model(attention_dropout=0.5)}):
        model = {name: noisy.pop(name) for name in ("model",) if name in noisy}
        assert logged(train(trainer=given | model, **noisy), "credit/drop_mean") == logged(plain, "credit/drop_mean")


def test_the_off_policy_mask_is_that_of_the_trainer_and_the_temperature_that_of_sampling(tmp_path):
    """TRL reads the one from its attribute; models and sampling have the other from the start."""

    class Strict(GRPOTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.off_policy_mask_threshold = 0.0

    class Changing(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if hasattr(grpo_trainer, "add_fused_lm_head"):  # before, TRL's loss had the attribute's
                self.trainer.temperature = 0.5

    packed = type("PackedStrict", (integration.CounterfactualMixin, Strict), {})
    options = {"num_iterations": 2, "max_steps": 4, "optim": "sgd", "learning_rate": 0.3, "num_generations": 4}
    given, results = {"credit": None, "packed_loss": True}, list[Any]()
    for cls in (GRPOTrainer, Strict, packed):
        change = Changing()
        made = {"callbacks": [change], "rollout_func": rollouts} | (given if cls is packed else {})
        change.trainer = build(str(tmp_path), cls, trainer=made, **options)
        change.trainer.train()
        results.append(parameters(change.trainer))
    torch.testing.assert_close(results[2], results[1], rtol=1e-4, atol=1e-6)
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(results[1].values(), results[0].values(), strict=True))


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
FAR = {
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 9,
    },
    "max_position_embeddings": 128, "original_max_position_embeddings": 9, "hidden_size": 32, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "shape"), [("GPT2", GPT2), ("Phi3", FAR)], ids=["learned", "longrope"])
def test_old_and_reference_log_probs_have_the_positions_of_the_loss(train, tmp_path, kind, shape):
    """Padding moves learned positions, and longrope's frequencies; the policy is the reference here."""
    vocabulary = {"vocab_size": len(tiny_tokenizer()), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    model = make_model(kind, **shape | vocabulary)
    model.save_pretrained(tmp_path / "model")
    options = {"beta": 0.3, "num_iterations": 2, "learning_rate": 0.0, "num_generations": 4}
    given = {"model": str(tmp_path / "model"), "credit": None, "packed_loss": True}
    done = train(trainer=given, model_init_kwargs={"dtype": "float32"}, **options)
    assert logged(done, "kl") == pytest.approx([0.0], abs=1e-6)
    assert logged(done, "clip_ratio/region_mean") == [0.0]


def test_credit_by_a_name_that_no_preset_has_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"credit must be 'none' or one of cf, .*, got 'cff'; did you"):
        build(str(tmp_path), trainer={"credit": "cff"})


@pytest.mark.parametrize(
    ("fed", "device", "accumulation", "said"),
    [(900, "cuda", 8, "size=64 with gradient_accumulation_steps=1 "), (1100, "cuda", 12, "size=32 with gradient_accum"),
     (900, "cuda", 2, "size=16 with gradient_accumulation_steps=1 "), (900, "cpu", 8, None),
     (5000, "cuda", 8, None), (900, "cuda", 1, None)],
)  # fmt: skip
def test_forwards_that_a_gpu_waits_for_are_named_once_with_the_size_that_fills_it(
    fed, device, accumulation, said, caplog
):
    PartialState(cpu=True)  # without which accelerate's logger raises
    trainer = object.__new__(integration.PackedGRPOTrainer)
    trainer.args = SimpleNamespace(per_device_train_batch_size=8, gradient_accumulation_steps=accumulation)
    trainer.accelerator, trainer._has_said_few = SimpleNamespace(device=torch.device(device)), False
    for _ in range(2):
        trainer._say_few_rows(fed)
    assert [said in record.getMessage() for record in caplog.records] == ([] if said is None else [True])
