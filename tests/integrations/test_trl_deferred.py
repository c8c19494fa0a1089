"""Credit from the training forward of `packed_loss=True`: the same as from a forward of its own, from fewer tokens."""

import logging
from typing import Any

import pytest
import torch

from cfa_kernels import CounterfactualConfig, counterfactual_credit
from cfa_kernels.rows import Rows
from cfa_kernels.scoring.packed import packed_forward

integration = pytest.importorskip("cfa_kernels.integrations.trl", reason="TRL is not installed", exc_type=ImportError)

from tests.support.plug_ins import TOTAL_EFFECTS  # noqa: E402
from tests.support.tiny import tiny_model, tiny_tokenizer  # noqa: E402
from tests.support.trl_training import (  # noqa: E402
    LORA,
    build,
    forwards,
    logged,
    packs,
    parameters,
    record_generations,
    rollouts,
    same_rollouts,
    uneven,
    with_vllm,
)  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), packs]
SGD = {"optim": "sgd", "learning_rate": 0.3}  # no square roots of gradients that are rounding alone
FIGURES = [
    name for name in integration._CREDIT_FIGURES if name.split("/")[1] not in ("tokens_fed", "forwards", "seconds")
]


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on credit is assigned to the generation batch by a forward of its own."""
    monkeypatch.setattr(integration, "why_at_once", lambda *given: "a test asks for it")


def train_both(train: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, Any]:
    options["trainer"] = {"packed_loss": True} | options.get("trainer", {})
    deferred = train(**options)
    at_once(monkeypatch)
    return deferred, train(**options)


def test_a_step_feeds_every_completion_once(tmp_path):
    recorded, record = record_generations()
    arguments = {"packed_loss": True, "rollout_func": same_rollouts}
    trainer = build(str(tmp_path), recorded, trainer=arguments, gradient_checkpointing=False)
    with forwards(trainer.model) as fed:
        trainer.train()
    ((_, output, _),) = record
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    rows = Rows.from_padded(*(output[name] for name in names))
    forward = packed_forward(tiny_model(), rows, keep_states=True)
    advantages = output["advantages"]
    options = {"advantages": advantages, "config": {"estimator": "masking"}}
    credit = counterfactual_credit(forward, tiny_tokenizer(), rows, **options)
    assert credit.work is not None
    assert logged(trainer, "packed/tokens_fed") == [forward.tokens_fed]
    assert logged(trainer, "credit/tokens_fed") == [credit.work.tokens_fed]
    assert sum(fed) == forward.tokens_fed + credit.work.tokens_fed


def config(**options: Any) -> dict[str, Any]:
    return {"trainer": {"credit": CounterfactualConfig.of(options)}}


def entropies(estimator: str) -> dict[str, Any]:
    """One group of three has an advantage, and only its completions are fed."""
    parts = {"credit": CounterfactualConfig(estimator=estimator), "reward_funcs": uneven, "log_entropy": False}
    return {"trainer": parts, "per_device_train_batch_size": 24}


SETTINGS: dict[str, dict[str, Any]] = {
    "as it comes": {"max_steps": 2},
    "LoRA with a reference model": {"trainer": {"peft_config": LORA}, "beta": 0.1, "max_steps": 2},
    "accumulation, a tool's tokens": {
        "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "trainer": {"rollout_func": rollouts},
    },
    "iterations within a step": {"steps_per_generation": 1, "gradient_accumulation_steps": 2, "num_iterations": 2},
    "reentrant checkpointing, truncated completions masked": {
        "gradient_checkpointing_kwargs": {"use_reentrant": True}, "mask_truncated_completions": True,
        "max_completion_length": 8,
    },
    "rows not fed": {"trainer": {"reward_funcs": uneven, "log_entropy": False}, "per_device_train_batch_size": 24},
    "prefix gain": config(estimator="prefix_gain"), "total effects": config(**TOTAL_EFFECTS),
    "entropies, rows not fed": entropies("entropy"),
    "entropies added, rows not fed": entropies("entropy_shaping"),
    "seeds": config(**{"estimator.preselect": 0.5, "estimator.preselect_by": "gradient"}),
}  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_training_and_figures_are_those_of_credit_at_once(train, monkeypatch, setting):
    deferred, plain = train_both(train, monkeypatch, **SGD | SETTINGS[setting])
    torch.testing.assert_close(parameters(deferred), parameters(plain), rtol=1e-4, atol=1e-5)
    # At once the loss's forward spares tokens at the end that get weight 0.
    sizes = [] if setting == "entropies, rows not fed" else ["packed/tokens_fed"]
    for name in ("loss", "grad_norm", "reward", "entropy", *sizes, *FIGURES):
        assert logged(deferred, name) == pytest.approx(logged(plain, name), rel=1e-4, abs=1e-5), name
    assert logged(plain, "credit/scored_fraction")[0] > 0
    fed, fed_at_once = (sum(logged(trainer, "credit/tokens_fed")) for trainer in (deferred, plain))
    assert fed < fed_at_once or "entropies" in setting


def test_so_they_are_under_autocast_to_the_rounding_of_bfloat16(train, monkeypatch):
    deferred, plain = train_both(train, monkeypatch, **SGD, bf16=True)
    for name in ("loss", "grad_norm", "credit/weight_mean", "credit/drop_mean"):
        assert logged(deferred, name) == pytest.approx(logged(plain, name), rel=3e-2, abs=3e-3), name
    started = dict(tiny_model().named_parameters())
    for name, value in parameters(deferred).items():  # casts of scoring, without gradient, do not serve the loss
        assert not torch.equal(value, started[name]), name


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_iterations": 2, "max_steps": 2}, "the policy changes between training forwards over one generation"),
        ({"top_entropy_quantile": 0.33}, "the loss reads entropies"),
        (config(control="random"), None),  # feeds nothing
        (config(estimator="gradient"), "estimator='gradient' reads nothing that a training forward has fed"),
        (config(estimator="entropy") | {"gradient_accumulation_steps": 2}, "weights='top' compares completions"),
        ({}, None),
    ],
    ids=str,
)
def test_what_keeps_credit_out_of_the_training_forward_is_said_once(train, caplog, options, reason):
    options["trainer"] = {"packed_loss": True} | options.get("trainer", {})
    with caplog.at_level(logging.WARNING, logger=integration.__name__):
        trainer = train(**options)
    said = [record.message for record in caplog.records if "a separate forward" in record.message]
    assert len(said) == (reason is not None)
    assert reason is None or reason in said[0]
    assert (trainer._deferred is not None) == (options == {"trainer": {"packed_loss": True}})


@pytest.mark.skipif(integration.TRL.release < (1, 14), reason="the stand-in for vLLM speaks TRL 1.14's interface")
def test_vllms_correction_takes_log_probs_beside_and_credit_is_deferred_all_the_same(train, monkeypatch):
    """TRL's padded forward for the log-probs keeps nothing that credit could read."""
    options = SGD | {"vllm_importance_sampling_mode": "sequence_mask", "gradient_accumulation_steps": 2}
    vllm = with_vllm(integration.PackedGRPOTrainer)
    deferred, plain = train_both(lambda **given: train(vllm, **given), monkeypatch, **options)
    assert deferred._deferred is not None
    torch.testing.assert_close(parameters(deferred), parameters(plain), rtol=1e-4, atol=1e-5)
    ratio = "sampling/importance_sampling_ratio/mean"
    for name in ("loss", "grad_norm", ratio, "packed/tokens_fed", *FIGURES):
        assert logged(deferred, name) == pytest.approx(logged(plain, name), rel=1e-4, abs=1e-5), name
    assert logged(deferred, ratio)[0] != pytest.approx(1, abs=0.01)
    assert sum(logged(deferred, "credit/tokens_fed")) < sum(logged(plain, "credit/tokens_fed"))
