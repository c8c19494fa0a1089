"""Add counterfactual credit to an algorithm of prime-rl: one advantage per sampled token in place of one per rollout.

The orchestrator has no weights and no GPU. So the policy is queried through its pool, by one prefill for each masked
sequence (`prompt_logprobs`), while other groups continue. Nothing here imports prime-rl or verifiers.
"""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import CounterfactualConfig
from ..credit.config import as_config
from ..credit.deferred import BatchKeys
from ..estimators.base import SIBLINGS
from ..rows import Rows, equal_prompts
from ..scoring.access import LogprobService
from .credit import OFFERS, credit_rows, obstacles, refuse, unmet_needs


class CounterfactualMixin:
    """Add credit to an algorithm that assigns advantages: `class Mine(CounterfactualMixin, GRPOAlgorithm)`.

    prime-rl constructs algorithms itself, so options are attributes of the class. A row is a branch of a trace, from
    its first trained token on. A message that several branches share has one credit, from the first of them.
    `credit/*` goes into the metrics of each trace.

    Attributes:
        counterfactual: configuration of credit or the name of a preset; None for no credit.
        tokenizer: the policy's; None loads it by the pool's model name.
        seed: a key of all draws, together with the step that an episode belongs to.
        dtype: in which the inference server computes.

    Raises:
        NotImplementedError: an algorithm, estimator or trace that credit cannot be combined with, each named.
    """

    counterfactual: ClassVar[CounterfactualConfig | str | None] = None
    tokenizer: Any = None
    seed: ClassVar[int] = 0
    dtype: ClassVar[torch.dtype] = torch.bfloat16

    action_loss_type: str
    policy_pool: Any

    def __init__(self, config: Any, policy_pool: Any) -> None:
        self._config = as_config(self.counterfactual)
        super().__init__(config, policy_pool)  # type: ignore[call-arg]
        name, loss, pool = type(self).__name__, self.action_loss_type, type(policy_pool).__name__
        others = obstacles(
            (loss != "rl", f"{name}: its tokens feed the {loss!r} loss, which reads no advantages"),
            (not hasattr(policy_pool, "score"), f"{pool}: it has no score(token_ids)"),
        )
        refuse([*unmet_needs(self._config, OFFERS["prime-rl"]), *others])
        self._keys = BatchKeys(self.seed)

    async def setup(self) -> None:
        """Set the algorithm up and load the policy's tokenizer."""
        await super().setup()  # type: ignore[misc]
        if self.tokenizer is None:
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(self.policy_pool.model_name)

    async def score_group(self, episodes: list[Any]) -> None:
        """Let the algorithm assign its advantages to a group, and multiply credit into them."""
        await super().score_group(episodes)  # type: ignore[misc]
        if self._config.control == "off":
            return
        traces = [
            trace
            for episode in episodes
            for trace in episode.traces
            if not trace.has_error and trace.agent.trainable and any(any(node.mask) for node in trace.nodes)
        ]
        parts = [(trace, *part) for trace in traces for part in _rows(trace)]
        if not parts:
            return
        if len(traces) == 1 and SIBLINGS in self._config.needs:
            refuse([f"trace {traces[0].id}, which is the only one of its group: set group_size above 1"])
        owners, _, prompts, completions, counted, advantages = zip(*parts, strict=True)
        step = getattr(getattr(episodes[0].run, "work", None), "step", 0)
        loop = asyncio.get_running_loop()

        def logprobs_of(*rows: Sequence[Tensor]) -> list[Tensor]:
            return asyncio.run_coroutine_threadsafe(self._logprobs(*rows), loop).result()

        credited, figures = await asyncio.to_thread(
            credit_rows, self.tokenizer, Rows(prompts, completions), counted, advantages,
            LogprobService(logprobs_of, dtype=self.dtype), config=self._config,
            seed=self._keys.key(step), groups=torch.tensor(equal_prompts(prompts)),
            rewards=torch.tensor([float(trace.reward) for trace in owners]),
        )  # fmt: skip
        for (_, nodes, *_), own, values in zip(parts, counted, credited, strict=True):
            rest = iter(values[own.bool()].tolist())
            for node in nodes:
                node.advantages = [next(rest) for _ in range(sum(node.mask))]
        for trace in traces:
            trace.record_metrics(figures)

    async def _logprobs(self, prompts: Sequence[Tensor], completions: Sequence[Tensor]) -> list[Tensor]:
        """Request the log-probs of completions after their prompts, at temperature 1."""
        sequences = [torch.cat(pair).tolist() for pair in zip(prompts, completions, strict=True)]
        values = await asyncio.gather(*map(self.policy_pool.score, sequences))
        return [torch.tensor(row[len(prompt) :]) for row, prompt in zip(values, prompts, strict=True)]


def _rows(trace: Any) -> Iterator[tuple[list[Any], Tensor, Tensor, Tensor, Tensor]]:
    """Yield the branches that train: own nodes, prompt, completion, 1 on its own sampled tokens, advantages."""
    seen = set[int]()
    for branch in trace.branches:
        own = [node for node in branch.nodes if any(node.mask) and id(node) not in seen]
        if not own or not branch.trainable:
            continue
        seen.update(map(id, own))
        where = f"trace {trace.id}, branch {branch.index}"
        refuse([f"images ({where})"] if getattr(branch, "multi_modal_data", None) is not None else [])
        if bad := [n for n, node in enumerate(own) if len(node.advantages or ()) != sum(node.mask)]:
            raise ValueError(f"{where}: the algorithm left sampled message {bad[0]} without one advantage per token")
        mask = [bool(one) and any(node is mine for mine in own) for node in branch.nodes for one in node.mask]
        first = mask.index(True)
        values = torch.zeros(len(mask))
        values[torch.tensor(mask)] = torch.tensor([*chain.from_iterable(node.advantages for node in own)])
        ids = torch.tensor(branch.token_ids)
        yield own, ids[:first], ids[first:], torch.tensor(mask[first:]).long(), values[first:]
