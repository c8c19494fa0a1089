"""Whole runs of TRL with credit: resumed, compiled, and what they tell the people who started them."""

import re
import warnings
from typing import Any

import pandas
import pytest
import torch

from cfa_kernels import CounterfactualConfig

integration = pytest.importorskip("cfa_kernels.integrations.trl", reason="TRL is not installed", exc_type=ImportError)

from trl import GRPOTrainer  # noqa: E402

from tests.support.embedded import reward_every_other  # noqa: E402
from tests.support.plug_ins import RESAMPLING  # noqa: E402
from tests.support.trl_training import build, logged, packs, parameters, record_generations, rollouts  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
UNIFORM = CounterfactualConfig(control="off")


@pytest.mark.parametrize(
    "config", [CounterfactualConfig(control="random"), CounterfactualConfig.of(RESAMPLING)], ids=["random", "resampled"]
)
def test_a_resumed_run_draws_what_the_run_it_resumes_would_have(tmp_path, config):
    def run(steps: int, checkpoint: str | None = None) -> tuple[Any, list[torch.Tensor]]:
        recorded, record = record_generations()
        options = {"save_strategy": "steps", "save_steps": 1, "max_steps": steps, "gradient_accumulation_steps": 2}
        options |= {"steps_per_generation": 1, "lr_scheduler_type": "constant"}
        trainer = build(str(tmp_path), recorded, trainer={"credit": config}, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer, [output["advantages"] for _, output, _ in record]

    whole, drawn = run(2)
    resumed, again = run(2, str(tmp_path / "checkpoint-1"))
    assert (len(drawn), len(again)) == (4, 2)  # two generations in each step
    assert any(not torch.equal(a, b) for a, b in zip(drawn[:2], drawn[2:], strict=True))
    torch.testing.assert_close(drawn[2:], again, rtol=0, atol=0)
    torch.testing.assert_close(parameters(resumed), parameters(whole), rtol=0, atol=0)


@packs
def test_a_compiled_model_trains_to_the_same_weights(train, caplog):
    """On a CPU only TRL's own forwards are compiled, which the log says."""
    options = {"optim": "sgd", "learning_rate": 0.3}
    given = {"credit": UNIFORM, "packed_loss": True}
    plain = parameters(train(trainer=given, **options))
    compiled = train(trainer=given, torch_compile=True, torch_compile_backend="eager", **options)
    assert hasattr(compiled.model_wrapped, "_orig_mod")
    assert caplog.text.count("torch_compile=True: packed forwards run as they are: model: the layers of") == 1
    weights = {name.removeprefix("_orig_mod."): value for name, value in parameters(compiled).items()}
    torch.testing.assert_close(weights, plain, rtol=1e-5, atol=1e-7)


def without_answers(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    made = rollouts(prompts, trainer)
    return (
        made
        | {"completion_ids": [[*row[:3], 1] for row in made["completion_ids"]]}
        | {name: [row[:4] for row in made[name]] for name in ("logprobs", "env_mask")}
    )


def warned(train: Any, **options: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained = train(**options)
    return trained, [str(one.message) for one in caught if "credit/scored_fraction" in str(one.message)]


def test_training_without_any_credit_warns_once_and_says_which_answers_are_read(train):
    given = {"rollout_func": without_answers, "reward_funcs": reward_every_other}
    trained, (said,) = warned(train, trainer=given, max_steps=2)
    assert logged(trained, "credit/scored_fraction") == [0.0, 0.0]
    for part in ("of 8 completions with an advantage none", "####", "answer_format", "So we add them up."):
        assert part in said, part


@pytest.mark.parametrize("config", [CounterfactualConfig(), UNIFORM, CounterfactualConfig(control="random")], ids=str)
def test_where_there_is_credit_or_none_is_wanted_nothing_is_warned_of(train, config):
    given = {"credit": config} | ({} if config.control is None else {"rollout_func": without_answers})
    assert not warned(train, trainer=given)[1]


def test_the_table_of_completions_shows_which_tokens_were_weighed(tmp_path):
    trainer = build(str(tmp_path), log_completions=True, max_steps=2)
    trainer.train()
    table = pandas.read_parquet(tmp_path / "completions" / "completions_00002.parquet")
    assert len(table["weighed"]) == len(table["completion"]) == 8
    scored = [(text, shown) for text, shown in zip(table["completion"], table["weighed"], strict=True) if shown]
    assert scored
    for text, shown in scored:
        for run in shown.split(" | "):
            phrase = re.fullmatch(r"(.*) \(\d+\.\d\d\)", run)[1]
            assert phrase in text
    assert any("#### 7 (1.50)" in shown or "#### 5 (1.50)" in shown for _, shown in scored)


def test_a_trainer_that_drops_completions_is_told_that_rewards_no_longer_fit(train):
    class Half(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            return {name: value[: len(value) // 2] if value.dim() else value for name, value in output.items()}

    cls = type("Filtered", (integration.CounterfactualMixin, Half), {})
    with pytest.raises(ValueError, match=r"rewards: 8 completions were rewarded and 4 are trained on.*Filtered must"):
        train(cls)
