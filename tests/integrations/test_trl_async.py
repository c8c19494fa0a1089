"""TRL's AsyncGRPO: its tree on a CPU, credit of its samples, and what it is refused; vLLM is a queue of samples."""

import queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cfa_kernels import Batch, CounterfactualConfig, Rows, counterfactual_credit
from tests.support.models import (
    ARCHITECTURES,
    DEVICE,
    HYBRIDS,
    MASKED,
    OTHERS,
    TREE,
    assert_same_gradients,
    gradients,
    make_model,
    plain_logprobs,
)
from tests.support.tiny import PHRASES, tiny_model, tiny_tokenizer

packing = pytest.importorskip(
    "trl.experimental.async_grpo.packing", reason="this TRL has no experimental AsyncGRPO", exc_type=ImportError
)

from datasets import Dataset  # noqa: E402
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer  # noqa: E402
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample  # noqa: E402

from cfa_kernels.integrations.trl_async import CounterfactualAsyncMixin, run_trees_anywhere  # noqa: E402

A, B, C, D, SEVEN, FIVE = (tiny_tokenizer().get_vocab()[phrase] for phrase in PHRASES)
PROMPT, TOOL = [3, 4, 5], [9, 10]
ROLLOUTS = [  # parts and who wrote them; the second forks from the first, and its first turn is context there
    [([A, B, 1], 1), (TOOL, 0), ([C, D, 1], 1), (TOOL, 0), ([A, SEVEN, 1], 1)],
    [([A, B, 1], 0), (TOOL, 0), ([B, D, FIVE, 1], 1), (TOOL, 0)],
    [([C, A, SEVEN, 1], 1)],
]
ADVANTAGES = [1.0, -0.5, 0.25]


def samples() -> list[Any]:
    made = []
    for rollout, advantage in zip(ROLLOUTS, ADVANTAGES, strict=True):
        ids = np.array([*PROMPT, *(i for part, _ in rollout for i in part)])
        mask = np.array([0] * len(PROMPT) + [own for part, own in rollout for _ in part])
        old = np.full(len(ids), -1.0, dtype=np.float32)
        made.append(
            RolloutSample([], [], ids, mask, old, advantage, model_version=0, group_id=0, metrics={"reward": 0.0})
        )
    return made


def rows_of(made: list[Any]) -> tuple[Rows, list[torch.Tensor]]:
    ends = [mask.nonzero()[0][[0, -1]] + [0, 1] for mask in (sample.completion_mask for sample in made)]
    whole = [torch.tensor(sample.input_ids) for sample in made]
    rows = Rows([w[:a] for w, (a, _) in zip(whole, ends)], [w[a:b] for w, (a, b) in zip(whole, ends)])  # noqa: B905
    return rows, [torch.tensor(s.completion_mask[a:b]) for s, (a, b) in zip(made, ends, strict=True)]


class Worker:
    """In place of TRL's, which asks a vLLM server; TRL's loader reads samples of a later step ahead."""

    def __init__(self, made: list[Any]) -> None:
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        for sample in made:
            self.rollout_buffer.put(sample)

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None: ...


def trainer(folder: Any, credit: CounterfactualConfig) -> Any:
    tiny_model().save_pretrained(folder / "model")
    config = AsyncGRPOConfig(
        str(folder), per_device_train_batch_size=3, gradient_accumulation_steps=1, token_budget=-1, max_steps=1,
        learning_rate=1e-2, use_cpu=True, bf16=False, report_to=[], dtype="float32", max_staleness=100,
        gradient_checkpointing=False, save_strategy="no", logging_steps=1,
    )  # fmt: skip
    transfer = SimpleNamespace(
        init_weight_transfer=lambda: None, pause=lambda: None, send_weights=list, resume=lambda: None,
        destroy=lambda: None,
    )  # fmt: skip
    made = Mine(
        str(folder / "model"), reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
        train_dataset=Dataset.from_dict({"prompt": ["3"] * 8}), processing_class=tiny_tokenizer(),
        rollout_worker=Worker(samples() * 4), weight_transfer=transfer, credit=credit,
    )  # fmt: skip
    run_trees_anywhere(made.model)
    return made


class Recording(AsyncGRPOTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.read = inputs["advantages"][inputs["token_index"] >= 0]
        return super().compute_loss(model, inputs, *args, **kwargs)


class Mine(CounterfactualAsyncMixin, Recording):
    """As a user writes it."""


@pytest.mark.parametrize("name", [*TREE, "GptOss", "DeepseekV3", "Qwen2Moe"])
def test_trls_tree_runs_on_a_cpu_as_rows_apart(name):
    """With windows that end inside the rows, soft caps, sinks, and values of another width than keys."""
    options = (ARCHITECTURES | OTHERS | MASKED)[name]
    model = make_model(name, **options | ({"sliding_window": 4} if "sliding_window" in options else {}))
    model.set_attn_implementation("eager")
    tree, made = packing.TreeRow(), samples()
    names = ("input_ids", "completion_mask", "old_log_probs", "advantage", "group_id")
    for sample in made:
        tree.add({name: getattr(sample, name) for name in names})
    pack = {name: tensor.to(DEVICE) for name, tensor in tree.pack().items()}
    options = {f"tree_{name}": pack[f"tree_{name}"] for name in ("kv_index", "cu_seqlens_q", "cu_seqlens_k")}
    rows, masks = rows_of(made)
    plain = plain_logprobs(model, rows.prompts, rows.completions)
    theirs = [row[mask.bool()] for row, mask in zip(plain, masks, strict=True)]
    expected = gradients(model, sum((k + 1) * row.sum() for k, row in enumerate(theirs)))
    run_trees_anywhere(model)
    inputs = {name: pack[name][None] for name in ("input_ids", "position_ids")}
    hidden, index = model.model(**inputs, use_cache=False, **options), pack["token_index"]
    logits = model.lm_head(hidden.last_hidden_state[0, index])
    cap = getattr(model.config, "final_logit_softcapping", None)
    lines = (logits if cap is None else cap * (logits / cap).tanh()).log_softmax(-1)
    ours = lines.gather(1, pack["shift_labels"][index, None])[:, 0].split([len(row) for row in theirs])
    torch.testing.assert_close(list(ours), theirs, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(model, sum((k + 1) * row.sum() for k, row in enumerate(ours))), expected)


@pytest.mark.parametrize(
    ("name", "reason"), [("Llama4Text", "chunked_attention"), ("Bamba", "carry a state"), ("Lfm2", "carry a state")]
)
def test_layers_that_trls_tree_does_not_describe_are_refused_by_name(name, reason):
    with pytest.raises(NotImplementedError, match=f"{reason}, which {name.removesuffix('Text')}"):
        run_trees_anywhere(make_model(name, **(MASKED | HYBRIDS)[name]))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"estimator": "gradient", "estimator.sigma": 0.0},
        {"units": "turns", "weights": "redistribute"},
    ],
    ids=str,
)
def test_a_step_trains_on_the_credited_advantages_of_its_samples(tmp_path, monkeypatch, options):
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)  # of a GPU only
    config = CounterfactualConfig.of(options)
    made = trainer(tmp_path, config)
    rows, masks = rows_of(samples())
    batch = Batch(rows, advantages=torch.tensor(ADVANTAGES), mask=masks)
    apart = counterfactual_credit(tiny_model().eval(), tiny_tokenizer(), batch, config=config)
    credited = apart.applied_to(torch.tensor(ADVANTAGES))
    before = {name: x.clone() for name, x in made.model.named_parameters()}
    made.train()
    expected = torch.cat([row[mask.bool()] for row, mask in zip(credited, masks, strict=True)])
    torch.testing.assert_close(made.read.cpu(), expected, rtol=0, atol=1e-4)
    assert len(made.read.unique()) > 4
    assert any(not torch.equal(x, before[name]) for name, x in made.model.named_parameters())
    assert "credit/seconds" in {name for entry in made.state.log_history for name in entry}


@pytest.mark.parametrize(
    ("credit", "message"),
    [
        (CounterfactualConfig("entropy"), "estimator='entropy': it needs the entropy of each sampled token's"),
        (CounterfactualConfig("sibling_edits"), "estimator='sibling_edits': it needs several completions"),
        (CounterfactualConfig(units="turns", target="gold"), "target='gold': it needs gold answers"),
    ],
)
def test_what_asyncgrpo_does_not_give_is_refused_by_name(credit, message):
    with pytest.raises(NotImplementedError, match=message):
        Mine("no model is loaded", credit=credit)
