"""Update verl's actor from packed trees: the completions of a prompt share its rows in one micro-batch.

`packed_update=True` in verl's configuration: the trainer keeps the completions of a prompt together, and its workers'
engines take log-probs, with gradients, from `packed_logprobs`. All else is verl's.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import Rows, packed_forward, packed_logprobs, run_inside
from ..model.parts import causal_lm

VERLS_OWN = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")
"""Requests of a batch beyond log-probs and entropies, of all workers alike; such batches run as in verl."""


def packs_updates(config: Any) -> bool:
    """Whether verl's configuration asks for updates of the actor from packed trees."""
    return bool(config.get("packed_update", False))


class PackedEngine:
    """Give verl's FSDP engine log-probs from packed trees: `class Mine(PackedEngine, FSDPEngineWithLMHead)`."""

    def forward_step(
        self: Any, micro_batch: Any, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute what verl's `forward_step` does, feeding each prompt of a micro-batch once."""
        from verl.utils.device import get_device_id
        from verl.utils.metric import Metric
        from verl.utils.tensordict_utils import get_non_tensor_data
        from verl.workers.engine.utils import detach_tree

        if any(get_non_tensor_data(micro_batch, name, False) for name in VERLS_OWN):
            return super().forward_step(micro_batch, loss_function, forward_only)  # type: ignore[misc, no-any-return]
        micro_batch = micro_batch.to(get_device_id())
        temperature = get_non_tensor_data(micro_batch, "temperature", 1.0)
        entropies = get_non_tensor_data(micro_batch, "calculate_entropy", False)
        output, fed = packed_outputs(self.module, micro_batch, temperature, entropies=entropies)
        loss, metrics = torch.ones(()), {}
        if loss_function is not None:
            group = self.get_data_parallel_group()
            loss, metrics = loss_function(model_output=output, data=micro_batch, dp_group=group)
            tokens = {"fed": fed, "unshared": micro_batch["input_ids"].values().numel()}
            workers = self.get_data_parallel_size()  # over which verl takes the mean; these are sums over all
            counts = {f"packed/tokens_{name}": float(count * workers) for name, count in tokens.items()}
            metrics = metrics | Metric.from_dict(counts, "sum")
        return loss, {"model_output": detach_tree(output), "loss": loss.detach().item(), "metrics": metrics}


def packed_outputs(
    module: nn.Module, rows: Any, temperature: float, *, entropies: bool
) -> tuple[dict[str, Tensor], int]:
    """Compute what verl's engine reads off the logits of rows, as `packed_logprobs` does; differentiable.

    Returns `log_probs` and, if wanted, `entropy`, jagged as `input_ids`, each at the place before its token, 0
    elsewhere; and the count of tokens fed.
    """
    ids, starts = list(rows["input_ids"].unbind()), rows["prompts"].offsets().diff().tolist()
    prompts = [row[:start] for row, start in zip(ids, starts, strict=True)]
    completions = [row[start:] for row, start in zip(ids, starts, strict=True)]
    causal = causal_lm(module)

    def body() -> tuple[list[Tensor] | tuple[list[Tensor], list[Tensor]], int]:
        forward = packed_forward(causal, Rows(prompts, completions))
        return forward.logprobs(temperature, return_entropy=entropies), forward.tokens_fed

    values, fed = run_inside(module, body, trains=True)
    columns = dict(zip(("log_probs", "entropy"), values if isinstance(values, tuple) else (values,), strict=False))

    def jagged(column: Sequence[Tensor]) -> Tensor:
        placed = [nn.functional.pad(row, (start - 1, 1)) for row, start in zip(column, starts, strict=True)]
        return torch.nested.nested_tensor_from_jagged(torch.cat(placed), rows["input_ids"].offsets())

    return {name: jagged(column) for name, column in columns.items()}, fed


def pack(engine: Any) -> None:
    """Let an engine of verl compute log-probs from packed trees from now on; all workers of a model call this."""
    with engine.train_mode():
        packed_logprobs(engine.module, Rows([], []))  # checks the model
    plain = type(engine)
    if not issubclass(plain, PackedEngine):
        engine.__class__ = type(f"Packed{plain.__name__}", (PackedEngine, plain), {})


class WholeGroups:
    """Keep the completions of a prompt in one micro-batch of a trainer of `verl.trainer.ppo.v1`."""

    config: Any
    actor_rollout_wg: Any
    _largest: float = math.inf  # tokens of the batch's largest group; infinite where groups are not whole

    def _balance_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        batch = super()._balance_batch(batch, *args, **kwargs)  # type: ignore[misc]
        if packs_updates(self.config):
            lengths = [tag["seq_len"] for tag in batch.tags]
            actor, size = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout.n
            workers = data_parallel_workers(self.actor_rollout_wg)
            cut = actor.shuffle or actor.ppo_mini_batch_size % workers  # by verl, into mini-batches
            groups = None if cut else whole_groups(batch.keys, lengths, size, workers)
            self._largest = math.inf
            if groups is not None:
                batch.reorder([row for rows in groups for row in rows])
                self._largest = max(sum(lengths[row] for row in rows) for rows in groups)
        return batch

    def _compute_old_log_prob(self, batch: Any, *args: Any) -> Any:
        tokens = self.config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu
        return self._together(tokens, super()._compute_old_log_prob, batch, *args)  # type: ignore[misc]

    def _update_actor(self, batch: Any, *args: Any) -> Any:
        tokens = self.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
        return self._together(tokens, super()._update_actor, batch, *args)  # type: ignore[misc]

    def _together(self, tokens: int, step: Callable[..., Any], batch: Any, *args: Any) -> Any:
        """Have verl deal the rows of a group as one if `tokens` hold the largest, of which verl counts each copy."""
        name = "force_group_size"  # read by verl's `prepare_micro_batches`
        if self.config.actor_rollout_ref.actor.use_dynamic_bsz and self._largest <= tokens:
            batch.extra_info[name] = self.config.actor_rollout_ref.rollout.n
        batch = step(batch, *args)
        (batch.extra_info or {}).pop(name, None)
        return batch


def data_parallel_workers(group: Any) -> int:
    """Count the shares into which verl splits what it sends to a worker group."""
    if "actor" not in group._dispatch_info:
        group._dispatch_info["actor"] = group._query_dispatch_info("actor")
    return max(group._dispatch_info["actor"]) + 1


def whole_groups(keys: Sequence[str], lengths: Sequence[int], size: int, workers: int) -> list[list[int]] | None:
    """Order rows of `lengths` so that the workers' equal shares are whole groups, of about the same tokens.

    `keys` are `uid_session_index`; a group has one uid and `size` rows. Returns the rows of each group, workers' shares
    one after the other; None if groups or shares cannot be whole.
    """
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    rows_of: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        rows_of.setdefault(key.rsplit("_", 2)[0], []).append(row)
    if any(len(rows) % size for rows in rows_of.values()):
        return None
    groups = [rows[i : i + size] for rows in rows_of.values() for i in range(0, len(rows), size)]
    if len(groups) % workers:
        return None
    tokens = [sum(lengths[row] for row in rows) for rows in groups]
    shares = get_seqlen_balanced_partitions(tokens, k_partitions=workers, equal_size=True)
    return [groups[i] for share in shares for i in share]
