"""OpenRLHF on a CPU: its modules without libraries that need a GPU, groups of actors in one process, rollouts."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from cfa_kernels.integrations.openrlhf import TreeScoring
from tests.support.log_prob_hosts import PROMPTS, REWARDS, completions, credited
from tests.support.tiny import tiny_model, tiny_tokenizer

GPU_LIBRARIES = ("deepspeed", "flash_attn", "vllm", "bitsandbytes", "optree", "pynvml", "torchmetrics")


class Replacements(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports any module of the named packages as one where every name is a mock."""

    def __init__(self, packages: set[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.startswith("flash_attn.ops"):  # without its kernels OpenRLHF computes log-probs in PyTorch
            return None
        if name.partition(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        engine = type("DeepSpeedEngine", (), {})  # which others ask models for
        return MagicMock(__path__=[], __name__=spec.name, __version__="0.99", DeepSpeedEngine=engine)

    def exec_module(self, module: Any) -> None:
        pass


def skip_without(*packages: str) -> None:
    """Skip the test where one is not installed, also while mocks of packages can be imported."""
    for name in packages:
        try:
            distribution(name)
        except PackageNotFoundError:
            pytest.skip(f"{name} is not installed")


def replace_gpu_libraries(*others: str) -> set[str]:
    """Let OpenRLHF be imported where they are absent; return their names."""
    skip_without("openrlhf", "ray")
    absent = {name for name in (*GPU_LIBRARIES, *others) if importlib.util.find_spec(name) is None}
    sys.meta_path.append(Replacements(absent))
    return absent


@contextmanager
def imported() -> Iterator[SimpleNamespace]:
    """OpenRLHF's classes and modules; afterwards neither it nor what was replaced is imported."""
    finders = list(sys.meta_path)
    absent = replace_gpu_libraries()
    maker = importlib.import_module("openrlhf.trainer.ppo_utils.experience_maker")
    experience = importlib.import_module("openrlhf.trainer.ppo_utils.experience")
    actor = importlib.import_module("openrlhf.models.actor")
    maker.ray = SimpleNamespace(get=lambda references: references)
    yield SimpleNamespace(
        Maker=maker.RemoteExperienceMaker, Experience=experience.Experience, Actor=actor.Actor,
        trainer=importlib.import_module("openrlhf.trainer.ppo_trainer"),
    )  # fmt: skip
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] in absent | {"openrlhf"}]:
        del sys.modules[name]


class Actors:
    """OpenRLHF's actor group: as many batches for each of `number` actors, which `copies` processes share."""

    def __init__(self, actor: Any, number: int, copies: int) -> None:
        self.actor, self.number, self.copies, self.calls = actor, number, copies, []

    def async_run_method_batch(self, method_name: str, **lists: list[Tensor]) -> list[list[Tensor]]:
        assert method_name == "forward"
        batches = list(zip(*(lists[name] for name in ("sequences", "action_mask", "attention_mask")), strict=True))
        assert len(batches) % self.number == 0
        self.calls.append(batches)
        with torch.no_grad():
            given = [self.actor(sequences, actions, attention) for sequences, actions, attention in batches]
        share = len(given) // self.number
        return [given[i : i + share] for i in range(0, len(given), share) for _ in range(self.copies)]


class TreeActors:
    """OpenRLHF's group of actors with `TreeScoring`, `copies` processes each, all in this process."""

    def __init__(self, actors: int, copies: int = 1, model: nn.Module | None = None, **train: bool) -> None:
        self.ray_actor_type = SimpleNamespace(__ray_actor_class__=TreeScoring)
        self.copies, self.sent, self.emptied = copies, list[list[int]](), 0
        own = nn.Module()  # in place of OpenRLHF's `Actor`
        own.model = tiny_model().eval() if model is None else model
        self.workers = [self._worker(rank, own, train) for rank in range(actors * copies)]

    def _worker(self, rank: int, actor: nn.Module, train: dict[str, bool]) -> Any:
        worker: Any = object.__new__(type("Worker", (TreeScoring,), {"empty_cache": self._empty}))
        worker.actor, worker._rank = actor, rank
        shared = {"colocate_all": False, "colocate_actor_ref": False, **train}
        worker.strategy = SimpleNamespace(args=SimpleNamespace(train=SimpleNamespace(**shared)))
        return worker

    def _empty(self, _: Any = None) -> None:
        self.emptied += 1

    def async_run_method_batch(self, method_name: str, **lists: list[Any]) -> list[list[Any]]:
        """Deal items over actors, give all processes of one the same, as `RayActorGroup` does; one item each."""
        ((name, items),) = lists.items()
        assert len(items) * self.copies == len(self.workers)
        self.sent.append([len(share.batch) for item in items for share in item])
        own = [pickle.dumps(items[rank // self.copies]) for rank in range(len(self.workers))]
        return [
            [getattr(worker, method_name)(**{name: pickle.loads(item)})]
            for worker, item in zip(self.workers, own, strict=True)
        ]


def settings(**changes: Any) -> Any:
    """OpenRLHF's arguments, as far as credit or its own experience maker reads them."""
    space = SimpleNamespace
    return space(
        actor=space(
            num_nodes=1, num_gpus_per_node=changes.get("actors", 1) * changes.get("copies", 1),
            policy_loss_type=changes.get("loss", "ppo"),
        ),
        algo=space(
            advantage=space(estimator=changes.get("estimator", "group_norm"), gamma=1.0, lambd=1.0, no_std_norm=False),
            kl=space(init_coef=changes.get("kl", 0.0), use_loss=changes.get("use_loss", False)),
        ),
        data=space(max_images_per_prompt=changes.get("images", 0)),
        ds=space(
            ring_attn_size=changes.get("copies", 1), tensor_parallel_size=changes.get("tensor", 1),
            deepcompile=changes.get("deepcompile", False),
        ),
        reward=space(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None),
        rollout=space(
            n_samples_per_prompt=changes.get("samples", 3), micro_batch_size=2, max_tokens_per_gpu=changes.get("tokens")
        ),
        train=space(
            colocate_all=False,
            colocate_actor_ref=False,
            dynamic_batch_enable="tokens" in changes,
            seed=changes.get("seed", 0),
        ),
    )  # fmt: skip


class Host:
    """Experience maker in OpenRLHF's place: rewards, less a half, are the advantages."""

    def __init__(self, group: Any, **changes: Any) -> None:
        self.args, self.tokenizer, self.actor_model_group = settings(**changes), tiny_tokenizer(), group

    def compute_advantages_and_returns(self, made: list[Any]) -> list[Any]:
        for experience in made:
            experience.advantages = (experience.rewards - 0.5)[:, None] * experience.action_mask
        return made

    def _flatten_results(self, references: list[list[Any]], copies: int) -> list[Any]:
        return list(chain.from_iterable(references[::copies]))


def experiences(kind: Callable[..., Any], rewards: Sequence[float] = REWARDS) -> list[Any]:
    """Six rollouts in two padded batches, as OpenRLHF concatenates them; one has a tool's token."""
    made = []
    for rows in (range(4), range(4, 6)):
        ids = [torch.tensor(PROMPTS[i] + completions()[i]) for i in rows]
        width = max(map(len, ids))
        sequences, attention, actions = (torch.zeros(len(ids), width, dtype=torch.long) for _ in range(3))
        for k, (i, row) in enumerate(zip(rows, ids, strict=True)):
            sequences[k, : len(row)], attention[k, : len(row)] = row, 1
            actions[k, len(PROMPTS[i]) : len(row)] = 1
            actions[k, len(PROMPTS[i]) + 1] = i != 1
        actions = actions[:, 1:]
        made.append(
            kind(
                sequences=sequences, attention_mask=attention, action_mask=actions, index=list(rows),
                rewards=torch.tensor([float(rewards[i]) for i in rows]), kl=torch.zeros(actions.shape), info={},
                mm_train_inputs=None,
            )
        )  # fmt: skip
    return made


def check_credited(made: list[Any], own: list[Any], options: dict[str, Any]) -> None:
    """Hold advantages to those of one process with the model at hand; a tool's token stays as it was."""
    rows = [pair for experience in own for pair in zip(experience.action_mask, experience.advantages, strict=True)]
    expected = credited(torch.stack([values[mask.bool()][0] for mask, values in rows]), options)
    given = [values for experience in made for values in experience.advantages]
    for prompt, completion, (mask, before), row, after in zip(
        PROMPTS, completions(), rows, expected, given, strict=True
    ):
        placed, first = before.clone(), len(prompt) - 1
        placed[first : first + len(completion)] = row[: len(completion)]
        torch.testing.assert_close(after, torch.where(mask.bool(), placed, before), rtol=1e-4, atol=1e-5)
