"""A stand-in of the interface of OpenRLHF's experience maker, as far as credit reads it."""

from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cfa_kernels import pad_rows
from tests.support.models import naive_row
from tests.support.tiny import tiny_model, tiny_tokenizer


def settings(**changes: Any) -> Any:
    """OpenRLHF's arguments, as far as credit reads them; `changes` are those of a test, by their last name."""

    def space(**own: Any) -> SimpleNamespace:
        return SimpleNamespace(**{name: changes.get(name, value) for name, value in own.items()})

    return SimpleNamespace(
        actor=space(num_nodes=1, num_gpus_per_node=1, policy_loss_type="ppo"),
        algo=SimpleNamespace(kl=space(init_coef=0.0, use_loss=False)), data=space(max_images_per_prompt=0),
        ds=space(ring_attn_size=1, tensor_parallel_size=1), rollout=space(n_samples_per_prompt=3, micro_batch_size=2),
        train=space(colocate_all=False, colocate_actor_ref=False, seed=0),
    )  # fmt: skip


class Host:
    """Experience maker in OpenRLHF's place: rewards, less a half, are the advantages."""

    def __init__(self, **changes: Any) -> None:
        self.args, self.tokenizer, self.actor_model_group = settings(**changes), tiny_tokenizer(), tiny_model()
        self.calls = list[list[Tensor]]()

    def compute_advantages_and_returns(self, experiences: list[Any]) -> list[Any]:
        for one in experiences:
            one.advantages = (one.rewards - 0.5)[:, None] * one.action_mask
        return experiences

    def _dispatch_forward(self, group: Any, empties_cache: bool, **lists: list[Tensor]) -> list[list[Tensor]]:
        copies = self.args.ds.ring_attn_size
        actors = self.args.actor.num_gpus_per_node // copies
        self.calls.append(lists["sequences"])
        columns = zip(lists["sequences"], lists["attention_mask"], lists["action_mask"], strict=True)
        results = []
        for ids, attention, actions in columns:
            assert torch.equal(actions, attention[:, 1:])
            rows = [row[mask.bool()] for row, mask in zip(ids, attention, strict=True)]
            results.append(pad_rows([naive_row(group, row[:1], row[1:]) for row in rows]))
        share, left = divmod(len(results), actors)
        assert left == 0
        return [results[i * share : (i + 1) * share] for i in range(actors) for _ in range(copies)]

    def _flatten_results(self, references: list[list[Tensor]], copies: int) -> list[Tensor]:
        return list(chain.from_iterable(references[::copies]))
