"""Add credit to OpenRLHF: a factor of `experience.advantages`, from log-probs that its actors are asked for."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import BatchKeys, LogprobService, Rows, pad_rows
from ..credit.config import as_config
from ..estimators.base import SIBLINGS
from . import require
from .credit import OFFERS, ONE_RATIO, credit_rows, obstacles, refuse, unmet_needs

OLDEST = "0.11.2"


class CounterfactualMixin:
    """Add credit to OpenRLHF's experience maker: `class Mine(CounterfactualMixin, RemoteExperienceMaker)`.

    `counterfactual` is a `CounterfactualConfig` or the name of a preset, None for no credit; `global_step` is a key of
    all draws, which the trainer sets before each step. `credit/*` goes into `experience.info`.
    """

    counterfactual: ClassVar[Any] = None
    global_step = 0

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        require("openrlhf", OLDEST)
        super().__init__(*args, **kwargs)
        settings, self._config = self.args, as_config(self.counterfactual)
        self._keys, self._completions = BatchKeys(settings.train.seed), settings.rollout.n_samples_per_prompt
        if self._config.control != "off":
            loss, kl, images = settings.actor.policy_loss_type, settings.algo.kl, settings.data.max_images_per_prompt
            cases = (
                (loss == "gspo", f"--actor.policy_loss_type gspo: {ONE_RATIO}; use ppo"),
                (kl.init_coef and not kl.use_loss, "a KL term in the reward; use --algo.kl.use_loss"),
                (images, f"images (--data.max_images_per_prompt {images})"),
            )
            lacks = {SIBLINGS} if self._completions == 1 else set()
            refuse([*unmet_needs(self._config, OFFERS["OpenRLHF"] - lacks), *obstacles(*cases)])

    @torch.no_grad()
    def compute_advantages_and_returns(self: Any, experiences: list[Any]) -> list[Any]:
        """Compute OpenRLHF's advantages and multiply credit into them; signed credit replaces them."""
        experiences = super().compute_advantages_and_returns(experiences)  # type: ignore[misc]
        if self._config.control == "off":
            return experiences
        into, prompts, completions, counted, own = zip(*chain.from_iterable(map(_rows, experiences)), strict=True)
        index = torch.tensor([number for experience in experiences for number in experience.index])
        credited, figures = credit_rows(
            self.tokenizer, Rows(prompts, completions, index.tolist()), counted, own, LogprobService(self._logprobs),
            config=self._config, seed=self._keys.key(self.global_step), groups=index // self._completions,
            rewards=torch.cat([experience.rewards for experience in experiences]),
        )  # fmt: skip
        torch._foreach_copy_(into, credited)
        for one in experiences:
            one.info |= {name: torch.full((len(one.sequences),), figure) for name, figure in figures.items()}
        return experiences

    def _logprobs(self: Any, prompts: Sequence[Tensor], completions: Sequence[Tensor]) -> list[Tensor]:
        """Request log-probs of completions in micro-batches of OpenRLHF's size, as many for each actor."""
        args, ids = self.args, [torch.cat(pair) for pair in zip(prompts, completions, strict=True)]
        copies = args.ds.ring_attn_size * args.ds.tensor_parallel_size  # processes that are given the same data
        actors = args.actor.num_nodes * args.actor.num_gpus_per_node // copies
        batches = list(torch.tensor([*map(len, ids)]).argsort().split(args.rollout.micro_batch_size))
        batches = batches[:1] * (-len(batches) % actors) + batches
        batches = [batch for first in range(actors) for batch in batches[first::actors]]
        masks = [pad_rows([torch.ones_like(ids[i]) for i in batch]) for batch in batches]
        references = self._dispatch_forward(
            self.actor_model_group, args.train.colocate_all or args.train.colocate_actor_ref,
            sequences=[pad_rows([ids[i] for i in batch]) for batch in batches],
            action_mask=[mask[:, 1:] for mask in masks], attention_mask=masks,
        )  # fmt: skip
        rows = chain.from_iterable(self._flatten_results(references, copies))
        found = dict(zip(torch.cat(batches).tolist(), rows, strict=True))
        return [found[i][len(prompts[i]) - 1 : len(ids[i]) - 1] for i in range(len(ids))]


def _rows(experience: Any) -> Iterator[tuple[Tensor, ...]]:
    """Yield samples: a view of their advantages, prompt, completion from the first sampled token, mask, advantages."""
    experience.advantages = experience.advantages.clone()
    columns = (experience.sequences, experience.attention_mask, experience.action_mask, experience.advantages)
    for sequence, attention, actions, advantages in zip(*columns, strict=True):  # action t belongs to token t + 1
        end = int(attention.sum())
        first = int(actions.argmax()) + 1 if actions.any() else end
        own = advantages[first - 1 : end - 1]
        yield own, sequence[:first], sequence[first:end], actions[first - 1 : end - 1].long(), own.clone()
