"""verl's own code with counterfactual credit: its trainer's step, its workers' log-probs.

Log-prob requests run in verl's FSDP engine without the sharding, trees in its FSDP2 engine on two processes; data goes
through a real TransferQueue.
"""

import os
import pickle
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cfa_kernels import CounterfactualConfig
from tests.support import sharded, verl_engine
from tests.support.log_prob_hosts import (
    CREDIT,
    PROMPTS,
    REWARDS,
    completions,
    credited,
)
from tests.support.plug_ins import TOTAL_EFFECTS
from tests.support.tiny import tiny_model, tiny_tokenizer

REASON = "verl (with ray, TransferQueue and tensordict) is not installed"
pytest.importorskip("verl.trainer.ppo.v1.trainer_base", reason=REASON, exc_type=ImportError)
REPOSITORY = Path(__file__).resolve().parents[2]

import transfer_queue as queue  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl.protocol import BatchData  # noqa: E402
from verl.trainer.ppo.v1 import PPOTrainerSync, trainer_base  # noqa: E402
from verl.workers.engine.fsdp import transformer_impl  # noqa: E402
from verl.workers.engine_workers import TrainingWorker  # noqa: E402

import cfa_kernels.integrations.verl as integration  # noqa: E402
from cfa_kernels import BatchKeys  # noqa: E402
from cfa_kernels.integrations.verl import CounterfactualMixin  # noqa: E402
from cfa_kernels.integrations.workers import Share, score_share  # noqa: E402
from cfa_kernels.scoring.access import LogprobService  # noqa: E402

pytestmark = pytest.mark.slow
KEYS = [f"{uid}_{i}_0" for i, uid in enumerate("pppqqq")]


@pytest.fixture(scope="module")
def config() -> Any:
    """The configuration of the documentation, as verl composes it, with credit."""
    with initialize_config_dir(str(REPOSITORY / "docs"), version_base=None):
        return compose("verl_gsm8k", overrides=["counterfactual.estimator.name=masking"])


@pytest.fixture(scope="module")
def transfer_queue() -> Any:
    """A real queue on a Ray of this machine."""
    import ray

    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield queue
    queue.close()
    ray.shutdown()


class WorkerGroup:
    """verl's worker group for `processes` data-parallel workers, each with the same model, in this process."""

    def __init__(self, processes: int, micro_batch: int, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(transformer_impl, "get_device_id", lambda: "cpu")
        monkeypatch.setattr(transformer_impl, "get_device_name", lambda: "cpu")
        engine = object.__new__(transformer_impl.FSDPEngineWithLMHead)
        engine.module = tiny_model().eval()
        engine.use_ulysses_sp, engine.ulysses_sequence_parallel_size, engine.pad_to_length = False, 1, False
        engine.ulysses_device_mesh, engine._autocast_dtype = None, torch.float32
        engine.get_data_parallel_group, engine.get_data_parallel_size = lambda: None, lambda: 1
        engine.eval_mode = lambda **kwargs: nullcontext()
        engine.engine_config = SimpleNamespace(entropy_checkpointing=False)
        self.worker = object.__new__(TrainingWorker)
        self.worker.engine, self.worker.model_config, self.worker.device_name = engine, {}, "cpu"
        self.worker.flops_counter = None
        self.worker.engine_config = SimpleNamespace(
            use_dynamic_bsz=dynamic, infer_max_token_len_per_gpu=64, infer_micro_batch_size_per_gpu=micro_batch,
            use_fused_kernels=False,
        )  # fmt: skip
        self.processes = processes
        self._dispatch_info: dict[str, Any] = {}
        self.requests: list[TensorDict] = []

    def _query_dispatch_info(self, mesh: str) -> list[int]:
        assert mesh == "actor"
        return list(range(self.processes))

    def compute_log_prob(self, request: TensorDict) -> TensorDict:
        self.requests.append(request)
        assert len(request) % self.processes == 0
        shares = [pickle.loads(pickle.dumps(share)) for share in BatchData(request).chunk(self.processes)]  # as Ray
        return BatchData([self.worker.infer_batch(share) for share in shares]).concat()


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Any:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def build(config: Any, workers: WorkerGroup | None, trainer: type = PPOTrainerSync, **credit: Any) -> Any:
    class Trainer(CounterfactualMixin, trainer):
        pass

    built = object.__new__(Trainer)
    built.config, built.tokenizer, built.actor_rollout_wg = config, tiny_tokenizer(), workers
    built.counterfactual = CounterfactualConfig.of(credit)
    built._keys, built.global_steps, built._access = BatchKeys(0), 0, LogprobService(built._logprobs)
    return built


def put(transfer_queue: Any, keys: list[str] = KEYS) -> Any:
    """Two groups of three rollouts in the queue, as verl's agent loop puts them; the last prompt is the longer."""
    responses = [torch.tensor(row) for row in completions()]
    prompts = [torch.tensor(row) for row in PROMPTS]
    masks = [torch.ones_like(row) for row in responses]
    masks[1][1] = 0  # a tool's token

    def nested(rows: list[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    def last(row: Tensor, value: float) -> Tensor:
        return torch.cat([torch.zeros(len(row) - 1), torch.tensor([value])])

    fields = {
        "prompts": nested(prompts), "responses": nested(responses), "response_mask": nested(masks),
        "rm_scores": nested([last(row, reward) for row, reward in zip(responses, REWARDS, strict=True)]),
        "old_log_probs": nested([torch.zeros(len(row)) for row in responses]),
    }  # fmt: skip
    data = TensorDict(fields, batch_size=6)
    data["uid"] = ["p", "p", "p", "q", "q", "q"]
    return transfer_queue.kv_batch_put(keys=keys, partition_id="train", fields=data, tags=[{} for _ in keys])


def advantages_of(batch: Any) -> list[Tensor]:
    where = {"keys": batch.keys, "partition_id": "train"}
    return list(queue.kv_batch_get(**where, select_fields=["advantages"])["advantages"].unbind())


def own_advantages(config: Any, transfer_queue: Any) -> list[Tensor]:
    return advantages_of(PPOTrainerSync._compute_advantage(build(config, None), put(transfer_queue), {}))


def check_credited(batch: Any, own: list[Tensor], options: dict[str, Any], temperature: float = 1.0) -> None:
    """Hold advantages to those of one process with the model at hand; a tool's token stays as verl left it."""
    expected = credited(torch.stack([row[0] for row in own]), options, temperature)
    expected[1, 1] = 0.0
    for given, row in zip(advantages_of(batch), expected, strict=True):
        torch.testing.assert_close(given, row[: len(given)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("processes", "micro_batch", "dynamic"), [(1, 1, False), (2, 3, False), (2, 1, True)])
def test_the_advantages_are_verls_times_the_weights_of_the_completions(
    config, transfer_queue, monkeypatch, processes, micro_batch, dynamic
):
    config = config.copy()
    config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz = dynamic
    config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu = micro_batch
    workers = WorkerGroup(processes, micro_batch, dynamic, monkeypatch)
    own = own_advantages(config, transfer_queue)
    metrics: dict[str, float] = {}
    batch = build(config, workers)._compute_advantage(put(transfer_queue), metrics)

    check_credited(batch, own, {})
    assert metrics["credit/scored_fraction"] == 5 / 6  # one has no answer
    assert {"credit/tokens_fed", "credit/seconds"} < metrics.keys()
    (request,) = workers.requests
    assert request["input_ids"].offsets().diff().max() <= 4 + 5  # cut after the answer


@pytest.fixture
def one_by_one(config) -> Any:
    """The configuration with log-prob requests that take a row at a time."""
    config = config.copy()
    config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu = 1
    config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz = False
    return config


@pytest.mark.parametrize(
    "options",
    [
        *CREDIT, {"estimator": "entropy"}, {"estimator": "entropy_shaping"},
        {"estimator": "entropy", "control": "random"},
        {"estimator.preselect": 0.5, "estimator.preselect_by": "entropy"},
    ],
    ids=str,
)  # fmt: skip
def test_every_estimator_by_name_does_in_verl_what_it_does_with_the_model_at_hand(
    one_by_one, transfer_queue, monkeypatch, options
):
    workers, metrics = WorkerGroup(1, 1, False, monkeypatch), dict[str, float]()
    own = own_advantages(one_by_one, transfer_queue)
    batch = build(one_by_one, workers, **options)._compute_advantage(put(transfer_queue), metrics)
    check_credited(batch, own, options, one_by_one.actor_rollout_ref.rollout.temperature)
    assert metrics["credit/scored_fraction"] > 0
    if options.get("control") == "random" or options.get("estimator") in ("prefix_tree", "sibling_edits"):
        assert workers.requests == []


def test_entropies_that_verl_has_computed_already_are_not_asked_for_again(one_by_one, transfer_queue, monkeypatch):
    batch = put(transfer_queue)
    rows = [torch.arange(len(row)).float() for row in completions()]
    known = TensorDict({"entropy": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, batch_size=6)
    batch = queue.kv_batch_put(keys=batch.keys, partition_id="train", fields=known)
    try:
        workers = WorkerGroup(1, 1, False, monkeypatch)
        trainer = build(one_by_one, workers, **{"estimator": "entropy", "weights.fraction": 0.05})
        given = advantages_of(trainer._compute_advantage(batch, {}))
    finally:
        queue.kv_clear(keys=batch.keys, partition_id="train")
    assert workers.requests == []
    kept = [[t for t, advantage in enumerate(row.tolist()) if advantage] for row in given]
    assert kept == [[], [5], [], [], [], [5]]  # the two highest of 26


def test_siblings_have_one_uid_and_one_prompt_and_a_session_the_reward_of_its_last_output():
    keys = ["a_b_0_1", "a_b_0_0", "a_b_1_0", "c_0_0", "a_b_2_0"]
    prompts = [torch.tensor(row) for row in ([2, 2], [1], [1], [1], [1])]
    assert integration._siblings(keys, prompts).tolist() == [0, 1, 1, 2, 1]
    scores = [torch.tensor(row) for row in ([0.25, 0.75], [9.0], [0.0], [0.5, 0.0], [-1.0])]
    assert integration._session_rewards(keys, scores).tolist() == [1.0, 1.0, 0.0, 0.5, -1.0]


@pytest.mark.parametrize("param_dtype", ["fp32", "bf16"])
def test_verls_engine_of_two_processes_scores_trees_as_one_process_does(param_dtype):
    sharded.run(2, verl_engine.scores_as_one_process, param_dtype)


class Group:
    """verl's worker group, of which each worker has the whole model."""

    world_size = 2

    def __init__(self, problem: Exception | None = None) -> None:
        self.model, self.problem, self.asked = tiny_model().eval(), problem, 0

    def init_model(self) -> None:
        pass

    def score_trees(self, shares: list[Share]) -> list[Any]:
        assert len(shares) == self.world_size
        self.asked += 1
        if self.problem is not None:
            raise self.problem
        return [score_share(self.model, pickle.loads(pickle.dumps(share))) for share in shares]


def set_up(config: Any, group: Any, **credit: Any) -> Any:
    class Host(PPOTrainerSync):
        def _setup(self) -> None:
            self._init_resource_pool_mgr()
            self.actor_rollout_wg = group

    trainer = build(config, None, Host, **credit)
    trainer._setup()
    return trainer


def test_where_the_actor_is_sharded_by_fsdp_its_workers_score_trees(config, transfer_queue):
    options = TOTAL_EFFECTS  # needs more than log-probs
    trainer, metrics = set_up(config, Group(), **options), dict[str, float]()
    ((role, worker),) = trainer.role_worker_mapping.items()
    assert issubclass(worker.__ray_actor_class__, integration.TreeScoring)
    assert str(role) == "actor_rollout"
    own = own_advantages(config, transfer_queue)
    check_credited(trainer._compute_advantage(put(transfer_queue), metrics), own, options)
    assert trainer.actor_rollout_wg.asked == 2  # of which the first checks the model


@pytest.mark.parametrize(
    ("change", "problem", "reason"),
    [
        ({"actor": {"strategy": "megatron"}}, None, "actor.strategy=megatron"),
        ({"model": {"use_fused_kernels": True}}, None, "model.use_fused_kernels=True"),
        ({}, NotImplementedError("Mamba has no tree"), "Mamba has no tree"),
    ],
    ids=str,
)
def test_where_trees_cannot_be_scored_the_log_says_why_and_requests_are_sent(config, caplog, change, problem, reason):
    config = OmegaConf.merge(config, {"actor_rollout_ref": change})
    trainer = set_up(config, Group(problem))
    assert isinstance(trainer._access, LogprobService)
    (said,) = [record.getMessage() for record in caplog.records if record.name == integration.__name__]
    assert said.startswith("credit: scored by log-prob requests")
    assert said.endswith(f"{reason}")
    config = OmegaConf.merge(config, {"counterfactual": TOTAL_EFFECTS})
    with pytest.raises(
        NotImplementedError, match=rf"estimator='total_effects': .*requested because of .*{re.escape(reason)}"
    ):
        set_up(config, Group(problem), **TOTAL_EFFECTS) if problem else integration.run(config)


def test_the_command_of_the_documentation_composes_its_configuration():
    page = (REPOSITORY / "docs" / "verl.md").read_text(encoding="utf-8")
    command = re.search(r"^python -m (cfa_kernels\S+) ((?:.*\\\n)*.*)$", page, re.MULTILINE)
    arguments = [*command[2].replace("\\\n", " ").split(), "--cfg", "job"]
    shown = subprocess.run(
        [sys.executable, "-m", command[1], *arguments], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    assert shown.returncode == 0, shown.stderr
    composed = OmegaConf.create(shown.stdout[shown.stdout.index("actor_rollout_ref:") :])
    assert (composed.trainer.nnodes, composed.trainer.n_gpus_per_node) == (2, 8)
    assert composed.counterfactual.estimator.name == "masking"


def test_the_configuration_of_the_documentation_is_valid_and_starts_a_trainer_with_credit(config, monkeypatch):
    import verl.trainer.main_ppo as main_ppo

    started: list[Any] = []
    monkeypatch.setattr(main_ppo, "run_ppo", lambda config, task_runner_class: started.append(task_runner_class))
    integration.run(config)
    (runner,) = started
    monkeypatch.setattr(trainer_base, "TRAINER_REGISTRY", dict(trainer_base.TRAINER_REGISTRY))
    monkeypatch.setattr(main_ppo.TaskRunnerV1.__ray_actor_class__, "run", lambda self, config: None)
    runner.__ray_actor_class__().run(config)
    trainer = trainer_base.get_trainer_cls(config.trainer.v1.trainer_mode)
    assert issubclass(trainer, CounterfactualMixin)
    assert issubclass(trainer, PPOTrainerSync)
    assert integration.credit_config(config) == CounterfactualConfig()


ONE_EACH = {"counterfactual": {"estimator": "prefix_tree"}, "actor_rollout_ref": {"rollout": {"n": 1}}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (ONE_EACH, "estimator='prefix_tree': it needs several completions of one prompt"),
        ({"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "kl_cov"}}}}, "loss_mode=kl_cov"),
        ({"algorithm": {"use_kl_in_reward": True}}, "use_kl_in_reward"),
        ({"distillation": {"enabled": True, "distillation_loss": {"use_task_rewards": False}}}, "use_task_rewards=F"),
        ({"actor_rollout_ref": {"rollout": {"enable_rollout_routing_replay": True}}}, "enable_rollout_routing_replay"),
        ({"trainer": {"use_v1": False}}, "use_v1=False"),
    ],
    ids=str,
)
def test_what_credit_cannot_be_combined_with_is_refused_by_name(config, change, message):
    with pytest.raises(NotImplementedError, match=f"cannot be combined with .*{message}"):
        integration.run(OmegaConf.merge(config, change))


@pytest.mark.filterwarnings("ignore:Disabled critic")
def test_with_credit_switched_off_the_launcher_is_verls_own_and_refuses_nothing(config, monkeypatch):
    import verl.trainer.main_ppo as main_ppo

    started: list[Any] = []
    monkeypatch.setattr(main_ppo, "validate_config", lambda **arguments: None)
    monkeypatch.setattr(main_ppo, "run_ppo", lambda *args, **kwargs: started.append((*args, *kwargs.values())))
    off = {"counterfactual": {"control": "off"}, "algorithm": {"use_kl_in_reward": True}}
    config = OmegaConf.merge(config, off)
    main_ppo.main(config)
    integration.run(config)
    theirs, mine = started
    assert mine == theirs


def test_a_trainer_reads_its_configuration_and_refuses_before_anything_starts(config):
    started: list[Any] = []
    host = type("Host", (), {"__init__": lambda self, config: started.append(config)})

    def make(**changes: Any) -> Any:
        return type("Trainer", (CounterfactualMixin, host), {})(OmegaConf.merge(config, changes))

    credit = {"weights": {"w_max": 3.0}, "spans": {"max_spans": 4}}
    trainer = make(counterfactual=credit, actor_rollout_ref={"actor": {"data_loader_seed": 5}})
    assert trainer.counterfactual == CounterfactualConfig.of(credit)
    assert trainer._keys.seed == 5
    with pytest.raises(NotImplementedError, match="use_kl_in_reward"):
        make(algorithm={"use_kl_in_reward": True})
    assert len(started) == 1


def test_a_model_of_images_is_refused_before_the_first_rollout(config, monkeypatch):
    made = SimpleNamespace(tokenizer=tiny_tokenizer(), processor="a processor of images")
    monkeypatch.setattr(trainer_base, "omega_conf_to_dataclass", lambda config: made)
    build(config, None, control="off")._init_tokenizer()
    with pytest.raises(NotImplementedError, match=r"cannot be combined with images \(a processor\)"):
        build(config, None)._init_tokenizer()
