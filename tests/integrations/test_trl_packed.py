"""`packed_loss=True`: losses and gradients are those of TRL's padded batch, from fewer tokens."""

from typing import Any

import pytest
import torch

from cfa_kernels.scoring import plan

pytest.importorskip("cfa_kernels.integrations.trl", reason="TRL is not installed", exc_type=ImportError)

from trl import GRPOTrainer

from cfa_kernels.integrations import trl_losses
from cfa_kernels.integrations.trl import PackedGRPOTrainer
from tests.support.models import MOE, assert_same_gradients, make_model
from tests.support.policy_problem import OF_TRL
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.trl_exact import LENGTHS, UNIFORM, assert_equal, batch, both, loss_and_gradients, noise
from tests.support.trl_training import (
    LORA,
    RELEASE,
    experts,
    forwards,
    logged,
    packs,
    parameters,
    rollouts,
    uneven,
    with_vllm,
)

# All is on the host: nothing to tell apart.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.traced, packs]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Any, Any]:
    return both(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize(
    ("loss_type", "level", "quantile", "bonus"),
    [
        (*kind, *((1.0, 0.0), (0.21, 0.0), (0.43, 0.3))[i % 3])
        for i, kind in enumerate(kind for kind in OF_TRL if kind[0] != "gmpo")
    ],
)
def test_loss_and_gradients_are_those_of_trls_padded_batch(pair, monkeypatch, loss_type, level, quantile, bonus):
    for trainer in pair:
        monkeypatch.setattr(trainer, "top_entropy_quantile", quantile)
        monkeypatch.setattr(trainer, "entropy_coef", bonus)
        monkeypatch.setattr(trainer, "_entropy_bonus_enabled", bonus > 0)
        monkeypatch.setattr(trainer, "loss_type", loss_type)
        monkeypatch.setattr(trainer, "importance_sampling_level", level)
    inputs = batch()
    if level == "sequence":  # one advantage and one ratio for each, as TRL has them there
        inputs["advantages"] = noise(2, -1.0, 1.0, 8)
    assert_equal(pair, inputs)


MASKED = {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 1.5}
BONUS = {"_entropy_bonus_enabled": True, "entropy_coef": 0.3}


@pytest.mark.parametrize(
    "changes",
    [
        {"beta": 0.1},
        {"temperature": 0.7, "_temperature": 0.7},
        {"epsilon_low": 0.01, "epsilon_high": 3.0},
        {"use_vllm": True, "vllm_importance_sampling_correction": True},
        MASKED,
        MASKED | {"loss_type": "vespo", "args.vespo_k_pos": 0.5},
        {"off_policy_mask_threshold": 0.3, "args.off_policy_mask_threshold": 0.3},
        BONUS,
        BONUS | {"top_entropy_quantile": 0.03, "beta": 0.1},
        BONUS | {"use_adaptive_entropy": True, "_last_world_entropy": 1.0, "args.entropy_target": 1.5},
        {"top_entropy_quantile": 0.51, "off_policy_mask_threshold": 0.3, "args.off_policy_mask_threshold": 0.3},
        {"args.delta": 1.5},
        {"beta": 0.1, "args.use_bias_correction_kl": True},
        {"loss_type": "sapo", "args.sapo_temperature_pos": 0.5, "args.sapo_temperature_neg": 2.0},
    ],
    ids=str,
)
def test_so_they_are_with_the_settings_of_trls_loss(pair, monkeypatch, changes):
    trainers, inputs = pair, batch()
    for trainer in trainers:
        for name, value in changes.items():
            of = trainer.args if name.startswith("args.") else trainer
            monkeypatch.setattr(of, name.removeprefix("args."), value, raising=False)
    if "beta" in changes:
        inputs["ref_per_token_logps"] = noise(4, -4.5, -1.5)
    if "vllm_importance_sampling_correction" in changes:
        inputs["importance_sampling_ratio"] = noise(5, 0.0, 2.0)
    sampled = noise(6, -4.5, -1.5)
    if "vllm_importance_sampling_mode" in changes:  # TRL makes the ratio before the loss, the packed loss itself
        counted = inputs["completion_mask"] * inputs["tool_mask"]
        ratio = ((inputs["old_per_token_logps"] - sampled) * counted).exp()
        monkeypatch.setattr(trainers[1], "use_vllm", True)
        given = [
            inputs | {"importance_sampling_ratio": ratio.masked_fill(ratio > 1.5, 0.0)},
            inputs | {"sampling_per_token_logps": sampled},
        ]
        pairs = [loss_and_gradients(trainer, one) for trainer, one in zip(trainers, given, strict=True)]
        torch.testing.assert_close(pairs[1][0], pairs[0][0], rtol=1e-5, atol=1e-6)
        assert_same_gradients(pairs[1][1], pairs[0][1])
        return
    if "off_policy_mask_threshold" in changes:
        inputs["sampling_per_token_logps"] = sampled
    assert_equal(trainers, inputs)


EXPERTS = {"Mixtral": {"num_local_experts": 4, "output_router_logits": True}, "Qwen2Moe": MOE}


@pytest.mark.parametrize("name", EXPERTS)
def test_the_loss_of_routers_is_that_of_the_padded_batch(tmp_path, monkeypatch, name):
    def model() -> Any:
        return make_model(name, num_hidden_layers=2, experts_implementation="eager", **EXPERTS[name])

    trainers = both(tmp_path, model, router_aux_loss_coef=0.5)
    assert trainers[1].aux_loss_enabled
    for budget in (2048, 10):  # in one pack, and in several
        monkeypatch.setattr(plan, "rows_per_forward", lambda *_, budget=budget: budget)
        assert_equal(trainers, batch(), tolerance=1e-6)  # transformers' loss is float32


def test_on_policy_the_current_logprobs_are_the_old_ones(pair):
    assert_equal(pair, {name: value for name, value in batch().items() if name != "old_per_token_logps"})


def test_what_the_loss_needs_of_no_completion_still_gives_every_parameter_a_gradient(pair, monkeypatch):
    inputs = batch() | {"tool_mask": torch.zeros(8, 9)}
    assert_all_zero(*loss_and_gradients(pair[1], inputs))
    monkeypatch.setattr(pair[1], "log_entropy", False)
    assert_all_zero(*loss_and_gradients(pair[1], batch() | {"advantages": torch.zeros(8)}))


def assert_all_zero(loss: torch.Tensor, gradients: dict[str, torch.Tensor]) -> None:
    assert loss == 0
    assert all(not gradient.any() for gradient in gradients.values())


def fed(trainer: Any, inputs: dict[str, Any]) -> list[int]:
    with torch.no_grad(), forwards(trainer.model.eval()) as sizes:
        trainer._compute_loss(trainer.model, inputs)
    return sizes


def test_prompts_are_fed_once_and_padding_never(pair, monkeypatch):
    inputs = batch()
    common = 5  # tokens that two completions of one prompt begin with
    needed = 6 + sum(LENGTHS[:4]) - 4 - common + 3 + sum(LENGTHS[4:]) - 3
    assert sum(fed(pair[0], inputs)) == 8 * (6 + 9)
    pair[1]._metrics["eval"].clear()
    assert sum(fed(pair[1], inputs)) == needed
    assert pair[1]._metrics["eval"]["packed/tokens_fed"] == [needed]
    assert pair[1]._metrics["eval"]["packed/tokens_padded"] == [8 * (6 + 9)]
    inputs["advantages"] = torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert sum(fed(pair[1], inputs)) == needed  # for the entropy alone
    monkeypatch.setattr(pair[1], "log_entropy", False)
    assert sum(fed(pair[1], inputs)) == 6 + 4 + 8
    with monkeypatch.context() as patch:  # entropies are read off the same forward
        patch.setattr(pair[1], "top_entropy_quantile", 0.5)
        assert sum(fed(pair[1], inputs)) == needed
    assert len(pair[1]._metrics["eval"]["entropy"]) == 3


SGD = {"optim": "sgd", "learning_rate": 0.3}  # no square roots of gradients that are rounding alone
AVERAGED = ("entropy", "clip_ratio/region_mean", "clip_ratio/high_max")  # over micro-batches


def truncated(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Rollouts of which every fourth has no end, a tool's tokens among them."""
    made = rollouts(prompts, trainer)
    for i in range(0, len(prompts), 4):
        for name in ("completion_ids", "logprobs", "env_mask"):
            made[name][i] = made[name][i][:4]
    return made


def train_both(train: Any, **options: Any) -> tuple[Any, Any]:
    given = options.pop("trainer", {})
    made = given.get("model", tiny_model)
    return tuple(train(trainer=given | {"packed_loss": one, "model": made()}, **SGD | options) for one in (False, True))


def assert_trained_alike(plain: Any, packed: Any) -> None:
    torch.testing.assert_close(parameters(packed), parameters(plain), rtol=1e-4, atol=1e-5)
    whole = plain.args.gradient_accumulation_steps == 1
    for name in ("loss", "grad_norm", "kl", "reward", "aux_loss", "entropy_coef", *(AVERAGED if whole else ())):
        assert logged(packed, name) == pytest.approx(logged(plain, name), rel=1e-4, abs=1e-5), name
    assert max(logged(packed, "grad_norm")) > 0
    fed, padded = logged(packed, "packed/tokens_fed"), logged(packed, "packed/tokens_padded")
    assert all(a < 0.8 * b for a, b in zip(fed, padded, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": False, "loss_type": "cispo", "num_iterations": 2, "max_steps": 2},
        {"loss_type": "bnpo", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4},
        {"trainer": {"peft_config": LORA}, "beta": 0.1, "num_iterations": 2, "max_steps": 2},
        {"trainer": {"rollout_func": rollouts}, "pad_to_multiple_of": 8, "cast_lm_head_to_fp32": True},
        {
            "mask_truncated_completions": True,
            "trainer": {"rollout_func": truncated},
            "max_steps": 2,
            "num_iterations": 2,
        },
        {"trainer": {"model": experts}, "gradient_accumulation_steps": 3},  # by default with the loss of its routers
        {"top_entropy_quantile": 0.33, "gradient_accumulation_steps": 3},  # over rows that TRL shuffles
        {"use_adaptive_entropy": True, "entropy_coef": 0.5, "entropy_target": 2.987, "max_steps": 3},
    ],
    ids=lambda options: "-".join(map(str, options)) or "as it comes",
)
def test_the_packed_loss_trains_as_trls_own_with_the_same_weights(train, options):
    assert_trained_alike(*train_both(train, **options))


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


def test_autocast_applies_to_packs_as_to_padded_batches(train):
    plain, packed = train_both(train, bf16=True)
    exact = train(trainer={"packed_loss": True}, **SGD)
    for name in ("loss", "grad_norm", "entropy"):
        assert logged(packed, name) == pytest.approx(logged(plain, name), rel=1e-2, abs=2e-3), name
    assert logged(packed, "grad_norm") != pytest.approx(logged(exact, "grad_norm"), rel=1e-4)


def test_a_head_in_float32_stays_so_under_autocast(train, monkeypatch):
    seen: list[Any] = []
    loss = trl_losses.packed_forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        forward = loss(*args, **kwargs)
        policy_loss = forward.policy_loss
        forward.policy_loss = lambda *a, **k: seen.append(torch.is_autocast_enabled("cpu")) or policy_loss(*a, **k)
        return forward

    monkeypatch.setattr(trl_losses, "packed_forward", watched)
    for in_float32 in (False, True):
        train(bf16=True, cast_lm_head_to_fp32=in_float32, trainer={"packed_loss": True})
    assert seen == [True, False]


def test_without_the_entropy_rows_without_advantage_are_not_fed_and_training_is_the_same(train):
    options = SGD | {"per_device_train_batch_size": 24, "trainer": {"reward_funcs": uneven, "packed_loss": True}}
    with_entropy = train(**options)
    options["trainer"] = options["trainer"] | {"log_entropy": False}
    without = train(**options)
    torch.testing.assert_close(parameters(without), parameters(with_entropy), rtol=1e-4, atol=1e-6)
    (few,), (all_rows,) = logged(without, "packed/tokens_fed"), logged(with_entropy, "packed/tokens_fed")
    assert few < 0.6 * all_rows
    assert not logged(without, "entropy")
    assert logged(without, "clip_ratio/region_mean") == logged(with_entropy, "clip_ratio/region_mean")


@pytest.mark.skipif(RELEASE < (1, 14), reason="the stand-in for vLLM speaks TRL 1.14's interface")
@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_vllms_correction_is_trls_and_its_figures_are_those_of_a_batchs_first_pass(train, mode):
    options = SGD | {"num_iterations": 2, "max_steps": 4, "vllm_importance_sampling_mode": mode}
    theirs = train(with_vllm(GRPOTrainer), **options)
    ours = train(with_vllm(PackedGRPOTrainer), trainer={"credit": None, "packed_loss": True}, **options)
    names = {name for name in theirs.state.log_history[0] if name.startswith("sampling/")}
    assert len(names) == 5
    for mine, other in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        assert {name for name in mine if name.startswith("sampling/")} == names & other.keys()
    torch.testing.assert_close(parameters(ours), parameters(theirs), rtol=1e-4, atol=1e-5)
    for name in names:
        assert len(logged(ours, name)) == 2
        assert logged(ours, name) == pytest.approx(logged(theirs, name), rel=1e-4), name


@pytest.mark.parametrize(
    ("options", "together"),
    [
        ({"gradient_accumulation_steps": 3}, True),
        ({"gradient_accumulation_steps": 3, "loss_type": "bnpo"}, False),
        ({"steps_per_generation": 3}, False),  # each an optimizer step of its own: rows stay in theirs
    ],
    ids=str,
)
def test_the_rows_of_one_optimizer_step_lie_by_prompt_in_its_micro_batches(train, options, together):
    seen: list[dict[str, Any]] = []
    steps = 2 if "steps_per_generation" in options else 1

    class Watched(PackedGRPOTrainer):
        def _compute_loss(self, model, inputs):
            seen.append(inputs)
            return super()._compute_loss(model, inputs)

    def rows(packed: bool) -> list[Any]:
        """What each optimizer step is made of."""
        seen.clear()
        arguments = {"packed_loss": packed, "credit": UNIFORM}
        given = {"max_steps": steps, "learning_rate": 0.0, "max_completion_length": 6} | options
        trained = train(Watched, trainer=arguments, **given)
        each = [
            (micro["prompt_ids"][b][micro["prompt_mask"][b] == 1].tolist(),
             micro["completion_ids"][b][micro["completion_mask"][b] == 1].tolist(), micro["advantages"][b].item())
            for micro in seen for b in range(len(micro["advantages"]))
        ]  # fmt: skip
        size = len(each) // steps
        assert trained.state.global_step == steps
        return [sorted(each[start : start + size]) for start in range(0, len(each), size)]

    theirs = rows(packed=False)
    assert max(len(micro["prompt_ids"].unique(dim=0)) for micro in seen) > 1
    assert rows(packed=True) == theirs
    assert (max(len(micro["prompt_ids"].unique(dim=0)) for micro in seen) == 1) == together
