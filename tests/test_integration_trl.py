"""TRL's GRPO trainer with counterfactual credit: real training of a tiny model, next to TRL's own."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import PHRASES, WORDS, tiny_model, tiny_tokenizer

from cfa_kernels import CounterfactualConfig, counterfactual_weights, integrations, policy_loss

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


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Any]:
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
            "args": GRPOConfig(str(tmp_path), **(settings | options)),
        }
        built = cls(**(made | (trainer or {})))
        built.train()
        return built

    return run


def parameters(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in trainer.model.named_parameters()}


def changed(a: Any, b: Any) -> bool:
    return any(not torch.equal(x, y) for x, y in zip(parameters(a).values(), parameters(b).values(), strict=True))


def logged(trainer: Any, name: str) -> list[float]:
    return [float(entry[name]) for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("config", [ONES, CounterfactualConfig(mode="uniform")], ids=["all one", "uniform"])
@pytest.mark.parametrize(
    "options",
    [{}, {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1}, {"num_iterations": 2}],
    ids=str,
)
def test_with_weights_of_one_training_is_trls_own_to_the_last_bit(train, tmp_path, config, options):
    tiny_model().save_pretrained(tmp_path / "model")  # with beta TRL loads the reference model from where it lies
    settings = options | {"trainer": {"model": str(tmp_path / "model")}}
    theirs, mine = (
        train(GRPOTrainer, **settings),
        train(trainer=settings["trainer"] | {"counterfactual": config}, **options),
    )
    assert not changed(theirs, mine)
    for name in ("loss", "grad_norm", "reward", "kl", "entropy"):
        assert logged(theirs, name) == logged(mine, name)
    assert (sum(logged(mine, "credit/tokens_fed")) > 0) == (config is ONES)


def test_training_with_credit_differs_from_trls_and_logs_what_credit_did(train):
    theirs, mine = train(GRPOTrainer), train()
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
        {"loss_type": "bnpo", "delta": 1.5, "num_iterations": 2},
        {"loss_type": "dr_grpo", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
        {"loss_type": "dapo", "steps_per_generation": 4, "per_device_train_batch_size": 4, "num_iterations": 2},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "sapo", "temperature": 0.7, "gradient_checkpointing": True},
        {"trainer": {"peft_config": LORA}, "beta": 0.1, "num_iterations": 2},
        {"trainer": {"rollout_func": rollouts}},
        {"cast_lm_head_to_fp32": True},
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


def test_random_weights_are_the_same_for_the_same_seed_and_leave_the_rollouts_alone(train):
    config = {"counterfactual": CounterfactualConfig(mode="random")}
    first, second, other = train(trainer=config), train(trainer=config), train(GRPOTrainer)
    assert not changed(first, second)
    assert logged(first, "reward")[0] == logged(other, "reward")[0]


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


def test_sharded_models_are_refused_and_gathered_ones_are_not(train, monkeypatch):
    trainer = train(max_steps=1)
    obstacles = integration._credit_obstacles
    assert list(obstacles(trainer)) == []
    state = trainer.accelerator.state
    monkeypatch.setattr(state, "distributed_type", integration.DistributedType.FSDP)
    assert any("whole model" in reason for reason in obstacles(trainer))
    monkeypatch.setattr(state, "distributed_type", integration.DistributedType.DEEPSPEED)
    assert list(obstacles(trainer)) == []
    monkeypatch.setattr(integration, "_zero_stage", lambda trainer: 3)
    trainer.args.ds3_gather_for_generation = False
    assert any("ds3_gather_for_generation=False" in reason for reason in obstacles(trainer))
    assert any("stage 3" in reason for reason in integration._fusion_obstacles(trainer))


DATA_PARALLEL = """
import sys
from types import SimpleNamespace
import torch
from datasets import Dataset
from tiny import PHRASES, tiny_model, tiny_tokenizer
from trl import GRPOConfig
from cfa_kernels.integrations.trl import CounterfactualGRPOTrainer

out, rows = sys.argv[1], int(sys.argv[2])
tokenizer = tiny_tokenizer()
vocabulary = tokenizer.get_vocab()

def rollouts(prompts, trainer):
    first = trainer.accelerator.process_index * len(prompts)  # the same eight completions, however they are split
    made = []
    for i in range(first, first + len(prompts)):
        reasoning = [PHRASES[(i + k) % 4] for k in range(2 + i % 3)]
        made.append([vocabulary[t] for t in [*reasoning, "#### 7" if i % 3 else "#### 5"]] + [1])
    prompt = tokenizer("What is 3 + 4 ?")["input_ids"]
    return {"prompt_ids": [prompt] * len(made), "completion_ids": made, "logprobs": [[-1.0] * len(r) for r in made]}

def reward(completions, **kwargs):
    return [float("#### 7" in text) for text in completions]

arguments = GRPOConfig(
    out, use_cpu=True, bf16=False, per_device_train_batch_size=rows, num_generations=8, max_completion_length=16,
    max_steps=2, report_to=[], logging_steps=1, save_strategy="no", learning_rate=1e-2, disable_tqdm=True,
    shuffle_dataset=False, optim="sgd",
)
results = {}
for loss in ("plain", "fused"):
    trainer = CounterfactualGRPOTrainer(
        model=tiny_model(), reward_funcs=reward, args=arguments, processing_class=tokenizer, rollout_func=rollouts,
        train_dataset=Dataset.from_dict({"prompt": ["What is 3 + 4 ?"] * 8}), fused_loss=loss == "fused",
    )
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "credit/tokens_fed" in entry]
    state = {name: value.detach() for name, value in trainer.model.named_parameters()}
    results[loss] = {"state": state, "log": log, "processes": trainer.accelerator.num_processes}
if trainer.accelerator.is_main_process:
    torch.save(results, out + "/result.pt")
"""


@fuses
@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(DATA_PARALLEL, encoding="utf-8")
    tests = Path(__file__).resolve().parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent), *sys.path])}
    results = []
    for processes in (1, 2):
        out = tmp_path / str(processes)
        out.mkdir()
        launch = [sys.executable]
        if processes > 1:
            launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [*launch, str(script), str(out), str(8 // processes)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(torch.load(out / "result.pt", weights_only=False))
    for loss in ("plain", "fused"):
        one, two = (result[loss] for result in results)
        assert (one["processes"], two["processes"]) == (1, 2)
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
