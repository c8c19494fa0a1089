"""verl's worker group under Ray: two actors, each with verl's own worker and engine, hold pieces of one model."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.plug_ins import TOTAL_EFFECTS
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.workers import credit, refuses_a_bad_id

REASON = "verl (with ray, TransferQueue and tensordict) is not installed"
pytest.importorskip("verl.trainer.ppo.v1.trainer_base", reason=REASON, exc_type=ImportError)

import ray  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from verl.protocol import BatchData  # noqa: E402
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # noqa: E402
from verl.single_controller.ray.base import create_colocated_worker_cls  # noqa: E402
from verl.workers.engine_workers import ActorRolloutRefWorker  # noqa: E402

from cfa_kernels.integrations.verl import with_tree_scoring  # noqa: E402
from cfa_kernels.integrations.workers import Workers  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
REPOSITORY = Path(__file__).resolve().parents[2]
# Read by a worker's process before it imports verl, which has no platform of a CPU.
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "VERL_USE_EXTERNAL_MODULES": "tests.support.verl_cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """verl's group of workers as its trainer makes it, the added methods included; only its GPUs are CPUs."""
    folder = str(tmp_path_factory.mktemp("model"))
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    overrides = {
        "model.path": folder, "model.use_remove_padding": "false", "model.enable_gradient_checkpointing": "false",
        "+model.override_config.attn_implementation": "sdpa", "actor.strategy": "fsdp2",
        "+actor.fsdp_config.mixed_precision.param_dtype": "fp32", "actor.fsdp_config.use_torch_compile": "false",
        "actor.optim.total_training_steps": "2", "actor.optim.lr": "0.0", "actor.use_kl_loss": "true",
        "actor.ppo_max_token_len_per_gpu": "60",
    }  # fmt: skip
    named = [
        f"{'+' * key.startswith('+')}actor_rollout_ref.{key.removeprefix('+')}={value}"
        for key, value in overrides.items()
    ]
    with initialize_config_dir(str(REPOSITORY / "docs"), version_base=None):
        config = compose("verl_gsm8k", overrides=named).actor_rollout_ref
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    worker = with_tree_scoring(ray.remote(ActorRolloutRefWorker))
    actor = RayClassWithInitArgs(cls=worker, config=config, distillation_config=None, role="actor")
    made = RayWorkerGroup(
        resource_pool=RayResourcePool([2], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=create_colocated_worker_cls({"actor": actor}), device_name="cpu", worker_env=ENVIRONMENT,
    ).spawn(prefix_set=["actor"])["actor"]  # fmt: skip
    made.init_model()
    yield made
    ray.shutdown()


@pytest.mark.parametrize(
    ("options", "groups"),
    [({}, [0, 0, 0, 0, 1, 2]), ({}, [0] * 6), (TOTAL_EFFECTS, [0, 0, 0, 0, 1, 2])],
    ids=["uneven groups", "a worker with nothing", "estimators that need the model"],
)
def test_two_workers_of_verl_under_ray_score_trees_as_one_process_does(group, options, groups):
    workers = Workers(group.score_trees, group.world_size)
    found = credit(workers, options, groups)
    expected = credit(tiny_model().eval(), options, groups)
    assert any(map(len, expected.drop))
    torch.testing.assert_close(found.drop, expected.drop, atol=2e-5, rtol=0)
    torch.testing.assert_close(found.base, expected.base, atol=2e-5, rtol=0, equal_nan=True)
    refuses_a_bad_id(workers)


def test_an_update_from_packed_trees_says_what_verls_own_update_says(group):
    from tests.support.verl_engine import GROUP, rows_to_train_on

    def updated() -> dict[str, Any]:
        batch = BatchData([rows_to_train_on(rank, **asked) for rank in range(2)]).concat()
        return group.update_actor(batch)["metrics"]

    asked = {
        "mini_batch_size": 2 * 3 * GROUP, "epochs": 1, "seed": 1, "dataloader_kwargs": {"shuffle": False},
        "global_batch_size": 2 * 3 * GROUP,
    }  # fmt: skip
    own = updated()
    group.pack_update()
    packed = updated()
    assert own["grad_norm"][0] > 0.1
    for name in ("grad_norm", "loss", "pg_loss", "kl_loss", "entropy_loss"):
        (key,) = {name, f"actor/{name}"} & own.keys()
        assert packed[key] == pytest.approx(own[key], rel=1e-4, abs=1e-6), key
