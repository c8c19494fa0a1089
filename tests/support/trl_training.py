"""Real training of a tiny model by TRL, the same every time, and what there is to see of it afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer

import cfa_kernels.integrations.trl as integration
from cfa_kernels import CounterfactualConfig
from cfa_kernels.model.check.verify import check_trainable
from cfa_kernels.model.modes import one_mode
from tests.support.tiny import PHRASES, tiny_model, tiny_tokenizer

RELEASE = integration.TRL.release
PROMPT = "What is 3 + 4 ?"
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=8)
packs = pytest.mark.skipif(RELEASE < (1, 10), reason="the packed loss needs TRL 1.10")


def experts() -> Qwen3MoeForCausalLM:
    """A mixture of experts that samples as `tiny_model` does; TRL takes the coefficient of its routers' loss."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **tiny_model().config.to_dict(), moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
        router_aux_loss_coef=0.5,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def texts(completions: list[Any]) -> list[str]:
    return [text if isinstance(text, str) else text[-1]["content"] for text in completions]


def seven(completions: list[Any], **kwargs: object) -> list[float]:
    return [float("#### 7" in text) for text in texts(completions)]


def uneven(completions: list[Any], **kwargs: object) -> list[float]:
    return [reward * (i < 8) for i, reward in enumerate(seven(completions))]


@contextmanager
def forwards(model: Any) -> Iterator[list[int]]:
    sizes: list[int] = []
    norm = model.model.layers[0].input_layernorm
    with norm.register_forward_hook(lambda _, args, out: sizes.append(args[0].shape[:2].numel())):
        with one_mode(model, training=True):
            check_trainable(model)  # again, as it has a hook
        sizes.clear()
        yield sizes


def build(
    folder: str, cls: type = integration.PackedGRPOTrainer, *, trainer: dict[str, Any] | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """A trainer for one step, if `options` (TRL's configuration) do not say otherwise; `trainer`: its arguments.

    With our mixin it masks spans and leaves the loss to TRL, so that each test says what it packs.
    """
    settings = {
        "use_cpu": True, "bf16": False, "per_device_train_batch_size": 8, "num_generations": 8,
        "max_completion_length": 10, "max_steps": 1, "report_to": [], "logging_steps": 1, "save_strategy": "no",
        "learning_rate": 1e-2, "disable_tqdm": True, "seed": 7,
    }  # fmt: skip
    made = {
        "reward_funcs": seven,
        "train_dataset": Dataset.from_dict({"prompt": [PROMPT, "Add 3 and 4", "halve 4 and 3"] * 8}),
        "processing_class": tiny_tokenizer(),
        "args": GRPOConfig(folder, **(settings | options)),
    }
    if issubclass(cls, integration.CounterfactualMixin):
        made |= {"credit": CounterfactualConfig(), "packed_loss": False}
    made |= trainer or {}
    return cls(**({"model": tiny_model()} | made))


def train(*args: Any, **options: Any) -> Any:
    built = build(*args, **options)
    built.train()
    return built


def parameters(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in trainer.model.named_parameters()}


def changed(a: Any, b: Any) -> bool:
    return any(not torch.equal(x, y) for x, y in zip(parameters(a).values(), parameters(b).values(), strict=True))


def logged(trainer: Any, name: str) -> list[float]:
    return [float(entry[name]) for entry in trainer.state.log_history if name in entry]


def record_generations() -> tuple[type, list[Any]]:
    """The trainer with a record of (advantages before, what the loss gets, whether that was in training)."""
    record: list[Any] = []

    class Base(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            record.append((output["advantages"].clone(), output, self.model.training))
            return output

    class Recorded(integration.CounterfactualMixin, Base):
        pass

    return Recorded, record


def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Completions of which a part is a tool's, as TRL's rollout functions give them."""
    tokenizer = tiny_tokenizer()
    vocabulary = tokenizer.get_vocab()
    solution = [vocabulary[PHRASES[0]], vocabulary[PHRASES[1]], vocabulary[PHRASES[2]]]
    completions = [
        [*solution, vocabulary["#### 7" if i % 3 else "#### 5"], tokenizer.eos_token_id] for i in range(len(prompts))
    ]
    return {
        "prompt_ids": [tokenizer(PROMPT)["input_ids"]] * len(prompts), "completion_ids": completions,
        "logprobs": [[-1.0] * len(row) for row in completions], "env_mask": [[1, 0, 1, 1, 1] for _ in completions],
    }  # fmt: skip


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


class SampledElsewhere:
    """In place of vLLM: completions, and log-probs of another policy than the trainer's."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def sync_weights(self) -> None:
        pass

    def generate(self, prompts: list[list[int]], num_generations: int, **kwargs: Any) -> Any:
        g = torch.Generator().manual_seed(0)
        answers = [tiny_tokenizer().get_vocab()[text] for text in PHRASES[-2:]]
        rows = [[*rollouts([0], None)["completion_ids"][0][:-1], 1] for _ in prompts]
        for i, row in enumerate(rows):
            row[3] = answers[i % 2]
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
