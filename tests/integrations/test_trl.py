"""TRL's GRPO trainer with counterfactual credit: real training of a tiny model, next to TRL's own."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cfa_kernels import CounterfactualConfig, Importances, Rows, counterfactual_credit
from tests.support.plug_ins import TOTAL_EFFECTS
from tests.support.tiny import PHRASES, tiny_model, tiny_tokenizer

integration = pytest.importorskip("cfa_kernels.integrations.trl", reason="TRL is not installed", exc_type=ImportError)

from datasets import Dataset  # noqa: E402
from trl import GRPOTrainer  # noqa: E402

from cfa_kernels.integrations.trl import PackedGRPOTrainer  # noqa: E402
from tests.support.trl_training import (  # noqa: E402
    LORA,
    PROMPT,
    changed,
    logged,
    record_generations,
    rollouts,
    seven,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ONES = CounterfactualConfig.of({"weights.w_min": 1.0, "weights.w_max": 1.0, "weights.w_answer": 1.0})

PADDED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


ASKED = Dataset.from_dict({"prompt": [[{"role": "user", "content": PROMPT}]] * 8})
TWO_STEPS = {"max_steps": 2}
FEATURES: list[dict[str, Any]] = [
    {}, {"num_iterations": 2} | TWO_STEPS,
    {"loss_type": "cispo", "importance_sampling_level": "sequence", "beta": 0.1} | TWO_STEPS,
    {"trainer": {"peft_config": LORA}, "beta": 0.1, "off_policy_mask_threshold": 0.5, "num_iterations": 2} | TWO_STEPS,
    {"steps_per_generation": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2} | TWO_STEPS,
    {"trainer": {"rollout_func": rollouts}, "top_entropy_quantile": 0.5, "gradient_checkpointing": True},
    {"trainer": {"train_dataset": ASKED}, "mask_truncated_completions": True, "bf16": True},
]  # fmt: skip


@pytest.mark.parametrize("options", FEATURES, ids=" ".join)
def test_with_weights_of_one_training_is_trls_own_to_the_last_bit(train, tmp_path, options):
    tiny_model().save_pretrained(tmp_path / "model")  # with beta TRL loads the reference model from where it lies
    given = {"model": str(tmp_path / "model")} | options.get("trainer", {})
    stock = train(GRPOTrainer, **options | {"trainer": given})
    trained = train(**options | {"trainer": given | {"credit": ONES}})
    assert not changed(stock, trained)
    for name in ("loss", "grad_norm", "reward", "kl", "entropy"):
        assert logged(stock, name) == logged(trained, name)
    assert sum(logged(trained, "credit/tokens_fed")) > 0
    assert max(logged(trained, "grad_norm")) > 0


def test_the_advantages_are_trls_times_the_weights_of_the_completions(train):
    recorded, record = record_generations()
    train(recorded)
    ((before, output, _),) = record
    rows = Rows.from_padded(*(output[name] for name in PADDED))
    options = {"advantages": before, "config": {"estimator": "masking"}}
    weights = counterfactual_credit(tiny_model(), tiny_tokenizer(), rows, **options).weights
    assert torch.cat(weights).unique().numel() > 3
    for row, advantage, own in zip(output["advantages"], before, weights, strict=True):
        torch.testing.assert_close(row[: len(own)], advantage * own, rtol=1e-4, atol=1e-5)


def test_figures_leave_a_tools_tokens_out(train):
    recorded, record = record_generations()
    trained = train(recorded, trainer={"rollout_func": rollouts})
    ((before, output, _),) = record
    weights = output["advantages"] / before[:, None]
    assert (weights[:, 1] == 0).all()  # a tool's
    assert (weights[:, [0, 2]] != 1).all()
    expected = weights[(output["completion_mask"] * output["tool_mask"]).bool()].mean()
    assert logged(trained, "credit/weight_mean")[0] == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "here", "there", "expected"),
    [
        ("credit/tokens_fed", 3.0, 5.0, [8.0]),
        ("clip_ratio/high_max", 0.1, 0.3, [0.3]),
        ("clip_ratio/low_min", 0.1, 0.3, [0.1]),
        ("credit/weight_mean", 1.0, 2.0, [1.5]),
        ("credit/drop_mean", float("nan"), 4.0, [4.0]),  # one process had nothing to score
        ("credit/drop_mean", float("nan"), float("nan"), []),
        ("kl", 1.0, 2.0, [1.75]),  # of 10 tokens here and 30 there
    ],
)
def test_figures_of_two_processes_are_combined_by_what_they_mean(name, here, there, expected):
    trainer = object.__new__(PackedGRPOTrainer)
    trainer.importance_sampling_level, trainer._metrics = "token", {"train": defaultdict(list)}
    others = torch.tensor([there, 30.0 if name == "kl" else 1.0])
    trainer.accelerator = SimpleNamespace(device="cpu", gather=lambda local: torch.cat([local, others]))
    trainer._log_gathered({name: here}, "train", tokens=10)
    assert trainer._metrics["train"][name] == pytest.approx(expected)


def test_evaluation_is_trls_own_and_scores_nothing(train):
    recorded, record = record_generations()
    held_out = Dataset.from_dict({"prompt": [PROMPT] * 2})
    trained = train(
        recorded, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8,
        trainer={"eval_dataset": held_out},
    )  # fmt: skip
    evaluated = [(before, output) for before, output, training in record if not training]
    assert evaluated
    for before, output in evaluated:
        assert torch.equal(output["advantages"], before)
    assert logged(trained, "eval_reward")
    assert not logged(trained, "eval_credit/tokens_fed")


@pytest.mark.parametrize("estimator", ["gradient", "entropy", "prefix_tree", "sibling_edits", *TOTAL_EFFECTS.values()])
def test_an_estimator_by_name_trains(train, estimator):
    trained = train(trainer={"credit": CounterfactualConfig(estimator=estimator)})
    assert torch.isfinite(torch.tensor(logged(trained, "loss"))).all()
    assert logged(trained, "credit/scored_fraction")[0] > 0


def test_an_estimator_sees_the_rewards_and_groups_of_this_step(train):
    seen = []

    def estimate(model, batch):
        seen.append(batch)
        return Importances([torch.ones(len(units)) for units in batch.units], signed=True)

    cls, record = record_generations()
    train(cls, trainer={"credit": CounterfactualConfig(estimator=estimate, units="tokens")})
    (batch,), ((before, output, _),) = seen, record
    assert len(batch.groups.unique()) == 1
    rewards = batch.rewards
    assert set(rewards.tolist()) == {0.0, 1.0}
    torch.testing.assert_close(batch.advantages, (rewards - rewards.mean()) / (rewards.std() + 1e-4))
    mask = output["completion_mask"].bool()
    added = output["advantages"] - before[:, None]
    assert added[mask].eq(1).all() or added[mask].sub(1).abs().max() < 1e-6
    assert added[~mask].eq(0).all()


def test_rows_that_no_function_rewards_are_no_siblings(train):
    def some(completions, **_):
        return [None if i < 2 else float(i % 2) for i in range(len(completions))]

    seen = []

    def estimate(model, batch):
        seen.append(batch)
        return Importances([torch.zeros(len(units)) for units in batch.units])

    config = CounterfactualConfig(estimator=estimate, units="tokens", weights="identity")
    train(trainer={"credit": config, "reward_funcs": some})
    assert seen[0].rewards.tolist() == [0.0, 1.0] * 3


def test_completions_masked_as_truncated_are_siblings_of_the_others(train):
    """Their rewards are in the group's advantages, so their tokens are in its comparison."""

    def cut(prompts, trainer):
        made = rollouts(prompts, trainer)
        other = tiny_tokenizer().get_vocab()[PHRASES[3]]
        for i in (2, 4, 5, 7):  # correct, and further from the wrong ones than the one without an end
            made["completion_ids"][i][:2] = [other, other]
        for name in ("completion_ids", "logprobs"):
            made[name][1] = made[name][1][:4]
        return {name: made[name] for name in ("prompt_ids", "completion_ids", "logprobs")}

    config = CounterfactualConfig(estimator="prefix_tree")
    cls, record = record_generations()
    options = {"rollout_func": cut, "credit": config}
    trained = train(cls, trainer=options, mask_truncated_completions=True)
    ((before, output, _),) = record
    assert output["completion_mask"].any(1).tolist() == [b != 1 for b in range(8)]
    made = cut([0] * 8, None)
    rows = Rows(*([torch.tensor(ids) for ids in made[name]] for name in ("prompt_ids", "completion_ids")))
    rewards = torch.tensor(seven(trained.processing_class.batch_decode(made["completion_ids"])))

    def credited(some: list[int]) -> list[torch.Tensor]:
        own = {"advantages": before[some], "rewards": rewards[some], "config": config}
        return counterfactual_credit(None, tiny_tokenizer(), rows.take(some), **own).applied_to(before[some])

    others = [0, *range(2, 8)]
    expected = [credited(list(range(8)))[b] for b in others]
    alone = credited(others)
    assert any(not torch.equal(*pair) for pair in zip(expected, alone, strict=True))
    for b, row in zip(others, expected, strict=True):
        torch.testing.assert_close(output["advantages"][b, :5], row)
