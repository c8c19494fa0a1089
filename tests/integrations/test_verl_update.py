"""verl's update from packed trees: on its FSDP2 engine in two processes, and how its trainer keeps groups together."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import sharded, verl_engine

REASON = "verl (with ray, TransferQueue and tensordict) is not installed"
pytest.importorskip("verl.trainer.ppo.v1.trainer_base", reason=REASON, exc_type=ImportError)

from omegaconf import OmegaConf  # noqa: E402
from transfer_queue import KVBatchMeta  # noqa: E402
from verl.trainer.ppo.v1 import PPOTrainerSync  # noqa: E402

import cfa_kernels.integrations.verl as integration  # noqa: E402
from cfa_kernels.integrations.verl import CounterfactualMixin  # noqa: E402
from cfa_kernels.integrations.verl_update import whole_groups  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("param_dtype", ["fp32", "bf16"])
def test_verls_engine_of_two_processes_updates_from_packed_trees_as_from_rows(param_dtype):
    sharded.run(2, verl_engine.updates_as_verl, param_dtype)


def keys_of(uids: str) -> list[str]:
    return [f"{uid}_{i}_0" for i, uid in enumerate(uids)]


def test_workers_get_whole_groups_of_about_the_same_tokens():
    lengths = {"a": 10, "b": 1, "c": 8, "d": 2}
    keys = keys_of("abcdabcdaabbccddaabb")[:16]
    groups = whole_groups(keys, [lengths[key[0]] for key in keys], 2, 2)
    assert sorted(row for rows in groups for row in rows) == list(range(16))
    uids = ["".join(keys[row][0] for row in rows) for rows in groups]
    assert all(one == one[0] * 2 for one in uids)
    tokens = [sum(2 * lengths[one[0]] for one in share) for share in (uids[:4], uids[4:])]
    assert tokens == [42, 42]
    for uids, size, workers in (("aab", 2, 1), ("aabb", 4, 1), ("aabbcc", 2, 2)):  # groups that cannot be whole
        assert whole_groups(keys_of(uids), [5] * len(uids), size, workers) is None


SETTINGS: dict[str, Any] = {
    "packed_update": True,
    "actor_rollout_ref": {
        "actor": {
            "shuffle": False, "use_dynamic_bsz": True, "ppo_mini_batch_size": 2, "ppo_max_token_len_per_gpu": 60,
            "data_loader_seed": 0,
            "strategy": "fsdp2", "ulysses_sequence_parallel_size": 1, "policy_loss": {"loss_mode": "vanilla"},
            "fsdp_config": {"ulysses_sequence_parallel_size": 1},
        },
        "model": {"use_fused_kernels": False},
        "rollout": {"n": 3, "log_prob_max_token_len_per_gpu": 90},
    },
}  # fmt: skip


class Told(PPOTrainerSync):
    """verl's trainer, of which each step says how its batch lies in the queue."""

    def __init__(self, config: Any) -> None:
        self.config, self.told = config, list[tuple[list[str], int]]()

    def _balance_batch(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self.actor_rollout_wg._dispatch_info["actor"] = [0, 1]
        batch.reorder(list(range(0, len(batch), 2)) + list(range(1, len(batch), 2)))
        return batch

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self.told.append((list(batch.keys), batch.extra_info.get("force_group_size", 1)))
        return batch

    _update_actor = _compute_old_log_prob


@pytest.mark.parametrize(
    ("change", "together"),
    [
        ({}, [3, 3]),
        ({"packed_update": False}, [1, 1]),
        ({"actor_rollout_ref": {"actor": {"ppo_max_token_len_per_gpu": 50}}}, [3, 1]),  # a group has 51 tokens
        ({"actor_rollout_ref": {"actor": {"use_dynamic_bsz": False}}}, [1, 1]),
        ({"actor_rollout_ref": {"actor": {"shuffle": True}}}, [1, 1]),
        ({"actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 3}}}, [1, 1]),
        ({"actor_rollout_ref": {"rollout": {"n": 4}}}, [1, 1]),
    ],
    ids=str,
)
def test_the_trainer_keeps_completions_of_a_prompt_in_one_micro_batch_where_verl_lets_it(change, together):
    config = OmegaConf.merge({"counterfactual": {"control": "off"}}, SETTINGS, change)
    trainer = type("Trainer", (CounterfactualMixin, Told), {})(config)
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={})
    keys = keys_of("aaabbbcccddd")
    batch = KVBatchMeta(keys=keys, tags=[{"seq_len": 15 + i % 3 + (i > 2)} for i in range(12)], partition_id="train")
    for step in (trainer._balance_batch, trainer._compute_old_log_prob, trainer._update_actor):
        batch = step(batch, {})
    assert not batch.extra_info
    assert [size for _, size in trainer.told] == together
    for order, size in trainer.told:
        assert sorted(order) == sorted(keys)
        assert size == 1 or all(len({key[0] for key in order[i : i + 3]}) == 1 for i in range(0, 12, 3))


def test_an_actor_whose_engine_cannot_pack_is_refused_by_name_before_anything_starts():
    change = {"counterfactual": {"control": "off"}, "actor_rollout_ref": {"actor": {"strategy": "megatron"}}}
    config = OmegaConf.merge(SETTINGS, change)
    for start in (integration.run, type("Trainer", (CounterfactualMixin, Told), {})):
        with pytest.raises(
            NotImplementedError, match=r"^packed_update=True cannot be combined with actor\.strategy=mega"
        ):
            start(config)
