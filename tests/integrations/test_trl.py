"""TRL's GRPO trainer with counterfactual credit: real training of a tiny model, next to TRL's own."""

import gc
import importlib
import multiprocessing
import os
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cfa_kernels import CounterfactualConfig, counterfactual_weights, integrations, policy_loss
from tests.tiny import PHRASES, WORDS, tiny_model, tiny_tokenizer

integration = pytest.importorskip("cfa_kernels.integrations.trl", reason="TRL is not installed", exc_type=ImportError)

from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from cfa_kernels.integrations.trl import CounterfactualGRPOTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
RELEASE = integration._TRL.release
PROMPT = "What is 3 + 4 ?"
ONES = CounterfactualConfig(w_min=1.0, w_max=1.0, w_answer=1.0)
fuses = pytest.mark.skipif(RELEASE < (1, 10), reason="the fused loss needs TRL 1.10")


def texts(completions: list[Any]) -> list[str]:
    return [text if isinstance(text, str) else text[-1]["content"] for text in completions]


def seven(completions: list[Any], **kwargs: object) -> list[float]:
    return [float("#### 7" in text) for text in texts(completions)]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Train for two steps and return the trainer; the same seed every time."""

    def run(cls: type = CounterfactualGRPOTrainer, *, trainer: dict[str, Any] | None = None, **options: Any) -> Any:
        settings = {
            "use_cpu": True, "bf16": False, "per_device_train_batch_size": 8, "num_generations": 8,
            "max_completion_length": 16, "max_steps": 2, "report_to": [], "logging_steps": 1, "save_strategy": "no",
            "learning_rate": 1e-2, "disable_tqdm": True, "seed": 7,
        }  # fmt: skip
        made = {
            "model": tiny_model(),
            "reward_funcs": seven,
            "train_dataset": Dataset.from_dict({"prompt": [PROMPT, "Add 3 and 4", "halve 4 and 3"] * 8}),
            "processing_class": tiny_tokenizer(),
            "args": GRPOConfig(str(tmp_path_factory.mktemp("run")), **(settings | options)),
        }
        built = cls(**(made | (trainer or {})))
        built.train()
        return built

    gc.freeze()  # every training collects garbage; without this it looks at all that was ever imported
    yield run
    gc.unfreeze()


@pytest.fixture(scope="module")
def theirs(train: Callable[..., Any]) -> Any:
    """TRL's own trainer after two steps."""
    return train(GRPOTrainer)


@pytest.fixture(scope="module")
def mine(train: Callable[..., Any]) -> Any:
    """The same with credit."""
    return train()


def parameters(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in trainer.model.named_parameters()}


def changed(a: Any, b: Any) -> bool:
    return any(not torch.equal(x, y) for x, y in zip(parameters(a).values(), parameters(b).values(), strict=True))


def logged(trainer: Any, name: str) -> list[float]:
    return [float(entry[name]) for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize(
    "options",
    [{}, {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1}, {"num_iterations": 2}],
    ids=str,
)
def test_with_weights_of_one_training_is_trls_own_to_the_last_bit(train, tmp_path, options):
    tiny_model().save_pretrained(tmp_path / "model")  # with beta TRL loads the reference model from where it lies
    model = {"model": str(tmp_path / "model")}
    stock = train(GRPOTrainer, trainer=model, **options)
    for config in (ONES, CounterfactualConfig(mode="uniform")):
        trained = train(trainer=model | {"counterfactual": config}, **options)
        assert not changed(stock, trained)
        for name in ("loss", "grad_norm", "reward", "kl", "entropy"):
            assert logged(stock, name) == logged(trained, name)
        assert (sum(logged(trained, "credit/tokens_fed")) > 0) == (config is ONES)


def test_training_with_credit_differs_from_trls_and_logs_what_credit_did(theirs, mine):
    assert changed(theirs, mine)
    for name in ("weight_mean", "weight_std", "scored_fraction", "spans_mean", "drop_mean", "drop_min", "seconds"):
        assert len(logged(mine, f"credit/{name}")) == 2, name
    assert min(logged(mine, "credit/tokens_fed")) > 0
    assert logged(theirs, "reward")[0] == logged(mine, "reward")[0]  # the first rollouts are the same


def record_generations(trainer_class: type = CounterfactualGRPOTrainer) -> tuple[type, list[Any]]:
    """The class with a record of (advantages before, what the loss gets, model's weights then)."""
    record: list[Any] = []

    class Base(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            record.append((output["advantages"].clone(), output, self.model.training))
            return output

    class Recorded(integration.CounterfactualMixin, Base):
        pass

    return Recorded, record


def test_the_advantages_are_trls_times_the_weights_of_the_completions(train):
    recorded, record = record_generations()
    train(recorded, max_steps=1)
    ((before, output, _),) = record
    weights = counterfactual_weights(
        tiny_model(), tiny_tokenizer(), output["prompt_ids"], output["prompt_mask"], output["completion_ids"],
        output["completion_mask"], advantages=before,
    )  # fmt: skip
    assert weights.unique().numel() > 3
    torch.testing.assert_close(output["advantages"], before[:, None] * weights, rtol=1e-4, atol=1e-5)


def test_rows_without_advantage_cost_no_scoring(train):
    fed: list[int] = []

    def uneven(completions: list[Any], **kwargs: object) -> list[float]:
        """Advantage for the first of three groups alone."""
        return [reward * (i < 8) for i, reward in enumerate(seven(completions))]

    class Counted(CounterfactualGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            hook = self.model.model.embed_tokens.register_forward_hook(
                lambda module, args, output: fed.append(args[0].numel()) if self.scoring else None
            )
            output = super()._generate_and_score_completions(inputs)
            hook.remove()
            return output

        scoring = False

        def _whole_model(self):
            self.scoring = True
            return super()._whole_model()

        def _log_credit(self, *args):
            self.scoring = False
            super()._log_credit(*args)

    everywhere = train(Counted, per_device_train_batch_size=24, max_steps=1)
    all_rows = logged(everywhere, "credit/tokens_fed")[0]
    proof = sum(fed) - all_rows  # that this model can be scored, once
    fed.clear()
    one_group = train(Counted, per_device_train_batch_size=24, max_steps=1, trainer={"reward_funcs": uneven})
    assert 0 < sum(fed) - proof < 0.6 * all_rows
    assert sum(fed) - proof == logged(one_group, "credit/tokens_fed")[0]
    assert logged(one_group, "credit/scored_fraction")[0] <= 1 / 3
    fed.clear()
    train(Counted, max_steps=1, trainer={"reward_funcs": lambda completions, **kwargs: [1.0] * len(completions)})
    assert fed == []


def test_figures_leave_a_tools_tokens_out(train):
    recorded, record = record_generations()
    trained = train(recorded, max_steps=1, trainer={"rollout_func": rollouts})
    ((before, output, _),) = record
    weights = output["advantages"] / before[:, None]
    assert weights[:, 1].std() > 0 or (weights[:, 1] != 1).any()
    expected = weights[(output["completion_mask"] * output["tool_mask"]).bool()].mean()
    assert logged(trained, "credit/weight_mean")[0] == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "here", "there", "expected"),
    [
        ("credit/tokens_fed", 3.0, 5.0, [8.0]),
        ("credit/seconds", 3.0, 5.0, [5.0]),
        ("clip_ratio/high_max", 0.1, 0.3, [0.3]),
        ("clip_ratio/low_min", 0.1, 0.3, [0.1]),
        ("credit/drop_min", -1.0, -4.0, [-4.0]),
        ("credit/weight_mean", 1.0, 2.0, [1.5]),
        ("credit/drop_mean", float("nan"), -4.0, [-4.0]),  # one process had nothing to score
        ("credit/drop_mean", float("nan"), float("nan"), []),
    ],
)
def test_figures_of_two_processes_are_combined_by_what_they_mean(name, here, there, expected):
    trainer = object.__new__(CounterfactualGRPOTrainer)
    trainer.accelerator = SimpleNamespace(device="cpu", gather=lambda local: torch.cat([local, torch.tensor([there])]))
    trainer._metrics = {"train": defaultdict(list)}
    trainer._log_gathered({name: here}, "train")
    assert trainer._metrics["train"][name] == pytest.approx(expected)


class Processor:
    """As TRL's models of images have: the tokenizer, and more."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tokenizer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def test_scoring_runs_in_trls_precision_with_the_tokenizer_of_a_processor(train, monkeypatch):
    seen: list[Any] = []
    credit = integration.counterfactual_credit

    def watched(model: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((torch.is_autocast_enabled("cpu"), type(tokenizer)))
        return credit(model, tokenizer, *args, **kwargs)

    class Processed(CounterfactualGRPOTrainer):
        def train(self):
            self.processing_class = Processor(self.processing_class)
            return super().train()

    monkeypatch.setattr(integration, "counterfactual_credit", watched)
    train(Processed, bf16=True, max_steps=1)
    assert seen == [(True, type(tiny_tokenizer()))]


def test_evaluation_is_trls_own_and_scores_nothing(train):
    recorded, record = record_generations()
    held_out = Dataset.from_dict({"prompt": [PROMPT] * 2})
    trained = train(
        recorded, max_steps=1, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8,
        trainer={"eval_dataset": held_out},
    )  # fmt: skip
    evaluated = [(before, output) for before, output, training in record if not training]
    assert evaluated
    for before, output in evaluated:
        assert torch.equal(output["advantages"], before)
    assert logged(trained, "eval_reward")
    assert not logged(trained, "eval_credit/tokens_fed")


def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Completions of which a part is a tool's, as TRL's rollout functions give them."""
    tokenizer = tiny_tokenizer()
    vocabulary = tokenizer.get_vocab()
    solution = [vocabulary[PHRASES[0]], vocabulary[PHRASES[1]], vocabulary[PHRASES[2]]]
    completions = [
        [*solution, vocabulary["#### 7" if i % 3 else "#### 5"], tokenizer.eos_token_id] for i in range(len(prompts))
    ]
    return {
        "prompt_ids": [tokenizer(PROMPT)["input_ids"]] * len(prompts),
        "completion_ids": completions,
        "logprobs": [[-1.0] * len(row) for row in completions],
        "env_mask": [[1, 0, 1, 1, 1] for _ in completions],
    }


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=8)
FEATURES: dict[str, dict[str, Any]] = {
    "LoRA": {"trainer": {"peft_config": LORA}},
    "LoRA with a reference model": {"trainer": {"peft_config": LORA}, "beta": 0.1},
    "several iterations": {"num_iterations": 2, "max_steps": 4},
    "steps per generation": {"steps_per_generation": 4, "per_device_train_batch_size": 4, "max_steps": 4},
    "gradient accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "a tool's tokens": {"trainer": {"rollout_func": rollouts}},
    "conversations": {
        "trainer": {
            "train_dataset": Dataset.from_dict({"prompt": [[{"role": "user", "content": PROMPT}]] * 8}),
        }
    },
    "truncated completions masked": {"mask_truncated_completions": True},
    "bfloat16 autocast": {"bf16": True},
    "off-policy masking": {"off_policy_mask_threshold": 0.5, "num_iterations": 2},
    "an entropy mask": {"top_entropy_quantile": 0.5},
    "sequence level": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "padding": {"pad_to_multiple_of": 8},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_of_trl_stays(train, feature):
    recorded, record = record_generations()
    options = FEATURES[feature]
    if "pad_to_multiple_of" in options and RELEASE < (1, 1):
        pytest.skip("this TRL cannot pad")
    trained = train(recorded, **options)
    assert max(logged(trained, "credit/tokens_fed")) > 0
    assert all(torch.isfinite(value).all() for value in parameters(trained).values())
    for before, output, _ in record:
        assert output["advantages"].shape == output["completion_ids"].shape
        folded, mask = output["advantages"], output["completion_mask"]
        assert (folded * mask.bool() != 0).any(1).sum() <= (before != 0).sum()
    if feature == "a tool's tokens":
        assert all("tool_mask" in output for _, output, _ in record)
    if "LoRA" in feature:
        assert any("lora" in name and value.abs().sum() > 0 for name, value in parameters(trained).items())


class SampledElsewhere:
    """In place of vLLM: completions, and log-probs of another policy than the trainer's."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def sync_weights(self) -> None:
        pass

    def generate(self, prompts: list[list[int]], num_generations: int, **kwargs: Any) -> Any:
        g = torch.Generator().manual_seed(0)
        rows = [[*rollouts([0], None)["completion_ids"][0][:-1], 1] for _ in prompts]
        for i, row in enumerate(rows):
            row[3] = len(WORDS) + 4 + i % 2  # one of the two answers
        logprobs = [(-3 + 0.3 * torch.randn(len(row), generator=g)).tolist() for row in rows]
        shaped = [[[value] for value in row] for row in logprobs]
        return prompts, rows, shaped, [[[i] for i in row] for row in rows]


def with_vllm(trainer_class: type) -> type:
    class Sampled(trainer_class):
        def train(self):
            self.use_vllm, self._last_loaded_step = True, 0
            self.vllm_generation = SampledElsewhere(self)
            return super().train()

    return Sampled


@pytest.mark.skipif(RELEASE < (1, 14), reason="the stand-in for vLLM speaks the interface of TRL 1.14 and later")
@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
@pytest.mark.parametrize("fused", [False, True])
def test_vllms_importance_ratios_multiply_with_the_weights(train, mode, fused):
    recorded, record = record_generations()
    trained = train(with_vllm(recorded), max_steps=1, vllm_importance_sampling_mode=mode, trainer={"fused_loss": fused})
    ((before, output, _),) = record
    ratio = output["importance_sampling_ratio"]
    assert ratio.shape == (8, 5 if mode.startswith("token") else 1)
    model = tiny_model()
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
    logits = model(ids, attention_mask=torch.cat([output["prompt_mask"], output["completion_mask"]], 1)).logits
    logprobs = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[:, -5:, 0]
    loss, _ = policy_loss(
        logprobs, output["old_per_token_logps"], before, output["completion_mask"],
        weights=ratio * output["advantages"] / before[:, None], epsilon_high=0.2,
    )  # fmt: skip
    assert logged(trained, "loss")[0] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)


@fuses
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "cispo", "epsilon_high": 1.2, "num_iterations": 2},
        {"loss_type": "bnpo", "epsilon": 0.01, "delta": 1.02, "num_iterations": 3, "max_steps": 3},
        {"loss_type": "dr_grpo", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
        {"loss_type": "dapo", "steps_per_generation": 4, "per_device_train_batch_size": 4, "num_iterations": 2},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "sapo", "temperature": 0.7, "gradient_checkpointing": True},
        {"trainer": {"peft_config": LORA}, "beta": 0.1, "num_iterations": 2},
        {"trainer": {"rollout_func": rollouts}},
    ],
    ids=str,
)
def test_the_fused_loss_trains_as_trls_own_with_the_same_weights(train, options):
    plain = train(**options)
    fused = train(**options | {"trainer": options.get("trainer", {}) | {"fused_loss": True}})
    for name, value in parameters(fused).items():
        torch.testing.assert_close(value, parameters(plain)[name], rtol=2e-3, atol=2e-4, msg=name)
    for name in ("loss", "grad_norm", "entropy", "kl", "clip_ratio/region_mean", "clip_ratio/high_max"):
        assert logged(fused, name) == pytest.approx(logged(plain, name), rel=1e-3, abs=1e-4), name
    assert max(logged(fused, "grad_norm")) > 0


@fuses
def test_the_fused_loss_takes_a_head_in_float32_on_a_model_in_bfloat16(train, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    options = {"cast_lm_head_to_fp32": True, "model_init_kwargs": {"dtype": "bfloat16"}, "max_steps": 1}
    plain, fused = (
        train(trainer={"model": str(tmp_path / "model"), "fused_loss": fused}, **options) for fused in (False, True)
    )
    assert {value.dtype for value in parameters(fused).values()} == {torch.float32, torch.bfloat16}
    for name in ("loss", "grad_norm", "entropy"):
        assert logged(fused, name) == pytest.approx(logged(plain, name), rel=1e-2, abs=1e-4), name


@fuses
def test_the_fused_loss_makes_no_logits_and_evaluates_too(train, monkeypatch):
    head = torch.nn.Linear.forward
    wide: list[Any] = []

    def watched(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.out_features == len(WORDS) + len(PHRASES) and torch.is_grad_enabled():
            wide.append(x.shape)
        return head(self, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", watched)
    trained = train(
        max_steps=1, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8,
        trainer={"fused_loss": True, "eval_dataset": Dataset.from_dict({"prompt": [PROMPT] * 2})},
    )  # fmt: skip
    assert wide == []
    assert logged(trained, "eval_loss")


def test_scores_do_not_depend_on_the_token_budget(train):
    budgets = (None, 24)
    trained = [train(max_steps=1, trainer={"counterfactual": CounterfactualConfig(token_budget=b)}) for b in budgets]
    assert logged(trained[1], "credit/forwards")[0] > logged(trained[0], "credit/forwards")[0]
    assert logged(trained[0], "loss") == pytest.approx(logged(trained[1], "loss"), rel=1e-4)


def test_random_weights_are_the_same_for_the_same_seed_and_leave_the_rollouts_alone(train, theirs):
    config = {"counterfactual": CounterfactualConfig(mode="random")}
    first, second = train(trainer=config), train(trainer=config)
    assert changed(theirs, first)
    assert not changed(first, second)
    stock, still = train(GRPOTrainer, learning_rate=0.0), train(trainer=config, learning_rate=0.0)
    for name in ("reward", "entropy", "completions/mean_length"):
        assert logged(stock, name) == logged(still, name)


class GMPOTrainer(GRPOTrainer):
    """By name alone the one in TRL's experimental part."""


REFUSED = {
    "vespo": ({"loss_type": "vespo"}, {}, "loss_type='vespo'"),
    "images": (
        {},
        {"train_dataset": Dataset.from_dict({"prompt": [PROMPT] * 8, "image": [None] * 8})},
        "images in the dataset",
    ),
    "entropy mask, fused": ({"top_entropy_quantile": 0.5}, {"fused_loss": True}, "top_entropy_quantile=0.5"),
    "off-policy mask, fused": (
        {"off_policy_mask_threshold": 0.5},
        {"fused_loss": True},
        "off_policy_mask_threshold=0.5",
    ),
    "entropy bonus, fused": ({"entropy_coef": 0.01}, {"fused_loss": True}, "an entropy bonus"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_credit_cannot_be_combined_with_is_refused_by_name(train, case):
    options, trainer, message = REFUSED[case]
    if "entropy_coef" in options and RELEASE < (1, 8):
        pytest.skip("this TRL has no entropy bonus")
    with pytest.raises(NotImplementedError, match=f"cannot be combined with .*{message}"):
        train(trainer=trainer, **options)


def test_gmpo_is_refused_by_name(train):
    class Mine(integration.CounterfactualMixin, GMPOTrainer):
        pass

    with pytest.raises(NotImplementedError, match="GMPOTrainer: its loss takes one advantage per sequence"):
        train(Mine)


def test_sharded_models_are_refused_and_gathered_ones_are_not(mine, monkeypatch):
    obstacles = integration._credit_obstacles
    assert list(obstacles(mine)) == []
    state = mine.accelerator.state
    monkeypatch.setattr(state, "distributed_type", integration.DistributedType.FSDP)
    assert any("whole model" in reason for reason in obstacles(mine))
    monkeypatch.setattr(state, "distributed_type", integration.DistributedType.DEEPSPEED)
    assert list(obstacles(mine)) == []
    monkeypatch.setattr(integration, "_zero_stage", lambda trainer: 3)
    monkeypatch.setattr(mine.args, "ds3_gather_for_generation", False)
    assert any("ds3_gather_for_generation=False" in reason for reason in obstacles(mine))
    assert any("stage 3" in reason for reason in integration._fusion_obstacles(mine))


def same_rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """The same eight completions, however many processes they are split over."""
    tokenizer = tiny_tokenizer()
    vocabulary = tokenizer.get_vocab()
    made = []
    for i in range(len(prompts)):
        i += trainer.accelerator.process_index * len(prompts)
        reasoning = [PHRASES[(i + k) % 4] for k in range(2 + i % 3)]
        made.append([vocabulary[text] for text in [*reasoning, "#### 7" if i % 3 else "#### 5"]] + [1])
    return {
        "prompt_ids": [tokenizer(PROMPT)["input_ids"]] * len(made),
        "completion_ids": made,
        "logprobs": [[-1.0] * len(row) for row in made],
    }


def train_in_parallel(rank: int, processes: int, port: int, out: Path) -> None:
    """What process `rank` does; the first one saves what came of it."""
    if processes > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    arguments = GRPOConfig(
        str(out), use_cpu=True, bf16=False, per_device_train_batch_size=8 // processes, num_generations=8,
        max_completion_length=16, max_steps=2, report_to=[], logging_steps=1, save_strategy="no", learning_rate=1e-2,
        disable_tqdm=True, shuffle_dataset=False, optim="sgd",
    )  # fmt: skip
    results = {}
    for loss in ("plain", "fused"):
        trainer = CounterfactualGRPOTrainer(
            model=tiny_model(), reward_funcs=seven, args=arguments, processing_class=tiny_tokenizer(),
            train_dataset=Dataset.from_dict({"prompt": [PROMPT] * 8}), rollout_func=same_rollouts,
            fused_loss=loss == "fused",
        )  # fmt: skip
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "credit/tokens_fed" in entry]
        drawn = trainer.accelerator.gather(torch.rand(1, generator=trainer._credit_generator))
        results[loss] = {"state": parameters(trainer), "log": log, "processes": len(drawn), "drawn": drawn}
    if rank == 0:
        torch.save(results, out / f"{processes}.pt")


@fuses
@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([integration.__name__, "datasets", "peft"])  # imports once for all of them
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [(0, 1), (0, 2), (1, 2)]
    started = [context.Process(target=train_in_parallel, args=(*rank, port, tmp_path), daemon=True) for rank in ranks]
    for process in started:
        process.start()
    for process in started:
        process.join(timeout=120)
    assert [process.exitcode for process in started] == [0, 0, 0]
    results = [torch.load(tmp_path / f"{processes}.pt", weights_only=False) for processes in (1, 2)]
    for loss in ("plain", "fused"):
        one, two = (result[loss] for result in results)
        assert (one["processes"], two["processes"]) == (1, 2)
        assert two["drawn"].unique().numel() == 2  # random weights differ from process to process
        for name, value in one["state"].items():
            torch.testing.assert_close(two["state"][name], value, rtol=1e-3, atol=1e-6, msg=f"{loss}: {name}")
        for a, b in zip(one["log"], two["log"], strict=True):
            assert float(b["loss"]) == pytest.approx(float(a["loss"]), rel=1e-3, abs=1e-6)
            assert float(b["credit/drop_min"]) == pytest.approx(float(a["credit/drop_min"]), rel=1e-3)
            assert float(b["credit/forwards"]) == 2 * float(a["credit/forwards"])  # each scores its own rows


@pytest.mark.parametrize(("installed", "found"), [(None, "which is not here"), ("0.8.2", "found 0.8.2")])
@pytest.mark.parametrize("package", ["trl", "verl"])
def test_an_absent_or_old_package_is_an_error_naming_the_version_needed(monkeypatch, package, installed, found):
    def version(name: str) -> str:
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    module = f"cfa_kernels.integrations.{package}"
    monkeypatch.setattr(integrations, "version", version)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ImportError, match=rf"{module} needs {package}>=\d+\.\d+\.\d+, {found}"):
        importlib.import_module(module)


def test_importing_the_library_imports_no_trainer():
    code = (
        "import sys, cfa_kernels, cfa_kernels.integrations, cfa_kernels.integrations.openrlhf; "
        "print([name for name in ('trl', 'verl', 'openrlhf', 'ray') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
