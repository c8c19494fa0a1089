"""What each of two processes does with verl's FSDP2 engine on a CPU: score trees, and update the actor from them."""

import tempfile
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.sharded import values
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.workers import as_one_process


def scores_as_one_process(rank: int, param_dtype: str) -> None:
    engine = engine_of(param_dtype)
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from cfa_kernels.integrations.verl import TreeScoring

    worker = object.__new__(type("Worker", (TreeScoring, ActorRolloutRefWorker), {}))
    worker.actor = SimpleNamespace(engine=engine)
    as_one_process(rank, worker.score_trees, 5e-5 if param_dtype == "fp32" else 0.2)
    assert engine.mode is None


GROUP, TOKENS = 4, 60
"""Completions of a prompt, and the most tokens of a micro-batch that verl is given: two groups exceed it."""


def rows_to_train_on(rank: int, groups: int = 3, **changes: Any) -> Any:
    """A batch as verl's engine gets it: groups of several lengths, off-policy, one without advantages."""
    from verl.utils.tensordict_utils import get_tensordict

    draw = torch.Generator().manual_seed(rank)

    def numbers(count: int) -> torch.Tensor:
        return torch.randint(3, 20, (count,), generator=draw)

    prompts = [prompt for g in range(groups) for prompt in [numbers(6 + g)] * GROUP]
    responses = [numbers(2 + (i + rank) % 5) for i in range(len(prompts))]
    drawn = {
        name: [torch.randn(len(row), generator=draw) for row in responses]
        for name in ("old_log_probs", "ref_log_prob", "advantages")
    }
    drawn["old_log_probs"] = [row * 0.3 - 3 for row in drawn["old_log_probs"]]
    drawn["advantages"] = [row * (i >= GROUP) for i, row in enumerate(drawn["advantages"])]
    masks = [torch.arange(len(row)).ne(1).long() for row in responses]  # the second token is a tool's
    columns = {
        "input_ids": [torch.cat(pair) for pair in zip(prompts, responses, strict=True)],
        "position_ids": [torch.arange(len(p) + len(r)) for p, r in zip(prompts, responses, strict=True)],
        "prompts": prompts, "responses": responses, "response_mask": masks, "loss_mask": masks,
        "ref_log_prob": [row - 3 for row in drawn.pop("ref_log_prob")], **drawn,
    }  # fmt: skip
    asked = {
        "use_dynamic_bsz": True, "max_token_len_per_gpu": TOKENS, "use_remove_padding": False, "temperature": 0.7,
        "calculate_entropy": True, "global_batch_size": 2 * len(prompts), "force_group_size": GROUP,
    }  # fmt: skip
    nested = {name: torch.nested.as_nested_tensor(list(rows), layout=torch.jagged) for name, rows in columns.items()}
    return get_tensordict(nested, asked | changes)


class Compared:
    """An engine before and after it packs; `fed` lists the tokens of packed trees."""

    def __init__(self, rank: int, param_dtype: str) -> None:
        from verl.workers.config import FSDPActorConfig
        from verl.workers.utils.losses import ppo_loss

        from cfa_kernels.scoring import packed

        self.rank, self.engine, self.fed = rank, engine_of(param_dtype), list[int]()
        actor = FSDPActorConfig(
            strategy="fsdp2", ppo_mini_batch_size=8, ppo_micro_batch_size_per_gpu=4, rollout_n=GROUP,
            entropy_coeff=0.02, use_kl_loss=True, kl_loss_coef=0.1,
        )  # fmt: skip
        self.loss = partial(ppo_loss, config=actor)
        forward = packed.packed_hidden

        def counted(walk: Any, pack: Any, **options: Any) -> torch.Tensor:
            self.fed.append(pack.num_tokens)
            return forward(walk, pack, **options)

        packed.packed_hidden = counted

    def update(self, **changes: Any) -> tuple[list[float], dict[str, Any], dict[str, torch.Tensor]]:
        with self.engine.train_mode():
            self.engine.optimizer_zero_grad()
            said = self.engine.forward_backward_batch(rows_to_train_on(self.rank, **changes), self.loss)
            metrics = {name: getattr(found, "values", found) for name, found in said["metrics"].items()}
            return said["loss"], metrics, values(self.engine.module, gradients=True)

    def step(self) -> float:
        with self.engine.train_mode():
            return self.engine.train_batch(rows_to_train_on(self.rank), self.loss)["metrics"]["grad_norm"]

    def asked(self) -> list[torch.Tensor]:
        """Log-probs and entropies of the responses, padded, as for old log-probs."""
        from verl.workers.utils.padding import no_padding_2_padding

        data = rows_to_train_on(self.rank)
        with self.engine.eval_mode():
            found = self.engine.forward_backward_batch(data, None, forward_only=True)["model_output"]
        return [no_padding_2_padding(found[name], data).float() for name in ("log_probs", "entropy")]


def updates_as_verl(rank: int, param_dtype: str) -> None:
    """Losses, metrics, gradients and log-probs from packed trees are those of verl's forward, also after a step."""
    compared, exact = Compared(rank, param_dtype), param_dtype == "fp32"
    from cfa_kernels.integrations.verl_update import pack

    near = {"rtol": 1e-4, "atol": 1e-5} if exact else {"rtol": 0.05, "atol": 0.05}
    engine, fed = compared.engine, compared.fed
    (losses, metrics, gradients), answers, plain = compared.update(), compared.asked(), type(engine)
    norm = torch.cat([value.flatten() for value in gradients.values()]).norm()
    assert not fed
    for _ in range(2):  # the second time does nothing
        pack(engine)
    fed.clear()
    found = compared.update()
    assert len(found[0]) == 3  # a group each
    unshared = len(rows_to_train_on(compared.rank)["input_ids"].values())
    assert sum(fed) < 0.7 * unshared
    # Times two workers, as verl takes the mean over workers of what a micro-batch counts.
    assert found[1].pop("packed/tokens_fed") == [2 * tokens for tokens in fed]
    assert sum(found[1].pop("packed/tokens_unshared")) == 2 * unshared
    torch.testing.assert_close(found[:2], (losses, metrics), **near)
    for other in (found, compared.update(force_group_size=1)):  # then groups are cut
        torch.testing.assert_close(sum(other[0]), sum(losses), **near)
        assert other[2].keys() == gradients.keys()
        for name, own in gradients.items():
            assert (other[2][name] - own).norm() < (1e-4 if exact else 0.1) * own.norm().clamp(min=1e-3), name
    torch.testing.assert_close(compared.asked(), answers, **near)
    assert compared.step() == pytest.approx(norm.item(), rel=near["rtol"])
    stepped = compared.asked()
    assert (stepped[0] - answers[0]).abs().max() > 1e-4
    fed.clear()
    compared.update(calculate_sum_pi_squared=True)  # which packed trees do not give
    engine.__class__ = plain
    torch.testing.assert_close(compared.asked(), stepped, **near)
    assert not fed


def engine_of(param_dtype: str) -> Any:
    import tests.support.verl_cpu  # noqa: F401, I001  registers the platform, before verl's engine is imported
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)  # transformers saves in the first process only
        folder = folders[0]
        tiny_model().save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        dist.barrier()
        model = HFModelConfig(
            path=folder, use_remove_padding=False, enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        )  # fmt: skip
        engine = FSDPEngineWithLMHead(
            model,
            FSDPEngineConfig(strategy="fsdp2", mixed_precision={"param_dtype": param_dtype}, use_torch_compile=False),
            FSDPOptimizerConfig(lr=1e-3, total_training_steps=2),
            CheckpointConfig(),
        )
        engine.initialize()
        dist.barrier()  # the folder goes when both have read it
    return engine
