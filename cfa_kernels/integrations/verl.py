"""Add counterfactual credit to verl: the step that makes the weights, and a launcher.

`python -m cfa_kernels.integrations.verl` starts verl's PPO trainer with one more step: after the advantages, the
actor's workers score the spans, and credit goes into the advantages, the only per-token tensor that reaches every loss.
On FSDP the workers score packed trees (`TreeScoring`); on other engines they get ordinary log-prob requests. With
`packed_update=True` they also update the actor from packed trees (`verl_update`).
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import CounterfactualConfig
from ..credit.config import as_config
from ..credit.deferred import BatchKeys
from ..estimators.base import SIBLINGS
from ..rows import Rows
from ..scoring.access import LogprobService, ModelAccess
from . import require
from .credit import OFFERS, credit_rows, obstacles, refuse, unmet_needs
from .verl_update import WholeGroups, data_parallel_workers, pack, packs_updates
from .workers import Share, Workers, score_share

OLDEST = "0.9.1"
_LOG = logging.getLogger(__name__)
_VERL = require("verl", OLDEST)

from verl.single_controller.base.decorator import Dispatch, register  # noqa: E402  the check above says more

# Losses in which weights on advantages are not weights on each token's loss: they use advantages, beyond their sign,
# outside the product with the ratio.
INEXACT_LOSSES = ("clip_cov", "dro", "geo_mean", "kl_cov")


def credit_config(config: Any) -> CounterfactualConfig:
    """Read the section `counterfactual` of verl's configuration; no credit unless it names an estimator."""
    return as_config(dict(config.get("counterfactual") or {}))


class TreeScoring:
    """Add packed trees to verl's actor worker: `class Mine(TreeScoring, ActorRolloutRefWorker)`."""

    actor: Any

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def score_trees(self, share: Share) -> Any:
        """Score this worker's share with the actor's model, see `score_share`; all workers are called at once."""
        engine = self.actor.engine
        with engine.eval_mode():
            return score_share(engine.module, share)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pack_update(self) -> None:
        """Let the actor's engine take log-probs from packed trees from now on; all workers are called at once."""
        pack(self.actor.engine)


def tree_obstacles(config: Any) -> list[str]:
    """Name the settings of verl with which its workers cannot score trees, so that log-prob requests are sent."""
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    if actor.strategy not in ("fsdp", "fsdp2"):
        return [f"actor.strategy={actor.strategy}"]
    pieces = max(actor.ulysses_sequence_parallel_size, actor.fsdp_config.ulysses_sequence_parallel_size)
    return obstacles(
        (pieces > 1, f"actor.fsdp_config.ulysses_sequence_parallel_size={pieces}"),
        (model.use_fused_kernels, "model.use_fused_kernels=True"),
    )


class CounterfactualMixin(WholeGroups):
    """Add credit to a trainer of `verl.trainer.ppo.v1`: `class Mine(CounterfactualMixin, PPOTrainerSync)`.

    Logs the same `credit/*` as in TRL, for the whole batch. `control="off"` switches credit off. A model that cannot be
    scored in packed trees gets log-prob requests; the log says so once, with the reason.

    Raises `NotImplementedError`, before the first rollout, for settings or a model that cannot be combined with credit
    or with `packed_update=True`, each named.
    """

    tokenizer: Any
    processor: Any
    global_steps: int
    role_worker_mapping: dict[Any, Any]
    _access: ModelAccess  # workers that score trees, or log-prob requests

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        self.counterfactual = credit_config(config)
        refuse_settings(config)
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        self._keys = BatchKeys(config.actor_rollout_ref.actor.data_loader_seed or 0)

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()  # type: ignore[misc]
        if self.processor is not None and (self.counterfactual.control != "off" or packs_updates(self.config)):
            refuse(["images (a processor) in verl"], "credit or packed_update=True")

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()  # type: ignore[misc]
        if packs_updates(self.config) or (self.counterfactual.asks_model and not tree_obstacles(self.config)):
            import ray
            from verl.trainer.ppo.utils import Role

            for role in {Role.Actor, Role.ActorRollout, Role.ActorRolloutRef} & set(self.role_worker_mapping):
                plain = self.role_worker_mapping[role].__ray_actor_class__
                own = type(f"TreeScoring{plain.__name__}", (TreeScoring, plain), {})
                self.role_worker_mapping[role] = ray.remote(own)

    def _setup(self) -> None:
        super()._setup()  # type: ignore[misc]
        group = self.actor_rollout_wg
        if packs_updates(self.config):
            group.pack_update()
        self._access = LogprobService(self._logprobs)
        if not self.counterfactual.asks_model:
            return
        if not (reasons := tree_obstacles(self.config)):
            workers = Workers(lambda shares: group.score_trees(shares), group.world_size)
            try:
                _LOG.info("credit: packed trees are scored on %d workers in %s", workers.count, workers.dtype)
                self._access = workers
            except NotImplementedError as error:
                reasons = [str(getattr(error, "cause", error))]  # Ray's own text is a traceback
        if reasons:
            refuse(_unmet_needs(self.config, reasons))
            _LOG.warning("credit: scored by log-prob requests, which share no prefixes: %s", "; ".join(reasons))

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        if self.counterfactual.control == "off":
            return batch
        import transfer_queue as queue
        from tensordict import TensorDict

        where = {"keys": batch.keys, "partition_id": batch.partition_id}
        fields = ["prompts", "responses", "response_mask", "advantages", "rm_scores"]
        reads = self.counterfactual.reads_entropies
        data = queue.kv_batch_get(**where, select_fields=[*fields, *["entropy"] * reads])
        prompts, responses, masks, advantages, scores = (list(data[name].unbind()) for name in fields)
        entropies = None
        if reads:
            known = data.get("entropy", None)  # from the forward that gave the old log-probs, if there was one
            temperature = self.config.actor_rollout_ref.rollout.temperature
            requested = self._request("entropy", prompts, responses, temperature) if known is None else known.unbind()
            entropies = list(requested)
        credited, figures = credit_rows(
            self.tokenizer, Rows(prompts, responses), masks, advantages, self._access, config=self.counterfactual,
            seed=self._keys.key(self.global_steps), groups=_siblings(batch.keys, prompts),
            rewards=_session_rewards(batch.keys, scores), entropies=entropies,
        )  # fmt: skip
        nested = torch.nested.as_nested_tensor(credited, layout=torch.jagged)
        batch = queue.kv_batch_put(**where, fields=TensorDict({"advantages": nested}, batch_size=len(credited)))
        metrics |= figures
        return batch

    def _logprobs(self, prompts: Sequence[Tensor], completions: Sequence[Tensor]) -> list[Tensor]:
        return self._request("log_probs", prompts, completions, 1.0)

    def _request(
        self, what: str, prompts: Sequence[Tensor], completions: Sequence[Tensor], temperature: float
    ) -> list[Tensor]:
        """Request `log_probs` or `entropy` of each token of completions from the workers' `compute_log_prob`."""
        from verl.utils.tensordict_utils import get_tensordict

        count, rollout = len(completions), self.config.actor_rollout_ref.rollout
        micro_batch = 1 if rollout.log_prob_use_dynamic_bsz else rollout.log_prob_micro_batch_size_per_gpu
        padding = -count % (data_parallel_workers(self.actor_rollout_wg) * micro_batch)  # equal shares of micro-batches
        prompts = [*prompts, *[prompts[-1]] * padding]
        completions = [*completions, *[completions[-1]] * padding]
        ids = [torch.cat(pair) for pair in zip(prompts, completions, strict=True)]
        rows = {
            "input_ids": ids,
            "position_ids": [torch.arange(len(row)) for row in ids],
            "loss_mask": [torch.ones_like(row) for row in completions],
            "prompts": prompts,
            "responses": completions,
            "response_mask": [torch.ones_like(row) for row in completions],
        }
        request = get_tensordict(
            {name: torch.nested.as_nested_tensor(list(row), layout=torch.jagged) for name, row in rows.items()},
            {"temperature": temperature, "calculate_entropy": what == "entropy", "compute_loss": False},
        )
        values = self.actor_rollout_wg.compute_log_prob(request)[what].unbind()
        return [row[len(prompts[b]) - 1 : len(ids[b]) - 1] for b, row in enumerate(values[:count])]


def _siblings(keys: Sequence[str], prompts: Sequence[Tensor]) -> Tensor:
    """Number the groups, (B,) int64: rows with one uid (keys are `uid_session_index`) and the same prompt."""
    numbers: dict[Any, int] = {}
    rows = [(key.rsplit("_", 2)[0], *prompt.tolist()) for key, prompt in zip(keys, prompts, strict=True)]
    return torch.tensor([numbers.setdefault(row, len(numbers)) for row in rows])


def _session_rewards(keys: Sequence[str], scores: Sequence[Tensor]) -> Tensor:
    """Return the reward of the last output of each row's session, (B,)."""
    sessions = [key.rpartition("_") for key in keys]
    last: dict[str, tuple[int, float]] = {}
    for (session, _, index), row in zip(sessions, scores, strict=True):
        last[session] = max(last.get(session, (-1, 0.0)), (int(index), row.sum().item()))
    return torch.tensor([last[session][1] for session, _, _ in sessions])


def _unmet_needs(config: Any, reasons: Sequence[str]) -> list[str]:
    offers = OFFERS["verl, by log-prob requests" if reasons else "verl"]
    offers = offers - {SIBLINGS} if config.actor_rollout_ref.rollout.n == 1 else offers
    because = f" (log-probs are requested because of {'; '.join(reasons)})" if reasons else ""
    return [need + because for need in unmet_needs(credit_config(config), offers)]


def refuse_settings(config: Any) -> None:
    """Raise `NotImplementedError` for settings that credit or `packed_update=True` cannot be combined with."""
    if credit_config(config).control != "off":
        loss, rollout = config.actor_rollout_ref.actor.policy_loss.loss_mode, config.actor_rollout_ref.rollout
        teacher: Any = config.get("distillation") or {}
        others = obstacles(
            (
                teacher.get("enabled") and not teacher.distillation_loss.use_task_rewards,
                "distillation.distillation_loss.use_task_rewards=False: such a loss reads no advantages",
            ),
            (loss in INEXACT_LOSSES, f"policy_loss.loss_mode={loss}: it uses advantages outside the product"),
            (config.algorithm.use_kl_in_reward, "algorithm.use_kl_in_reward; use actor.use_kl_loss"),
            (rollout.enable_rollout_routing_replay, "rollout.enable_rollout_routing_replay"),
            (not config.trainer.use_v1, "trainer.use_v1=False, verl's old trainer"),
        )
        refuse([*_unmet_needs(config, tree_obstacles(config)), *others])
    if packs_updates(config):
        refuse(tree_obstacles(config), "packed_update=True")


def run(config: Any) -> None:
    """Run `verl.trainer.main_ppo` with credit, `packed_update=True` or both in the trainer that `config` names."""
    if credit_config(config).control == "off" and not packs_updates(config):
        from verl.trainer.main_ppo import main

        main(config)
        return
    import ray
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    class TaskRunner(TaskRunnerV1.__ray_actor_class__):  # type: ignore[name-defined, misc]
        def run(self, config: Any) -> None:
            from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

            mode = config.trainer.v1.trainer_mode
            plain = TRAINER_REGISTRY[mode]
            TRAINER_REGISTRY[mode] = type(f"Counterfactual{plain.__name__}", (CounterfactualMixin, plain), {})
            super().run(config)

    refuse_settings(config)
    auto_set_device(config)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    run_ppo(config, task_runner_class=ray.remote(TaskRunner))


if __name__ == "__main__":
    import hydra

    hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)(run)()
