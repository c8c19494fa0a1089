"""Add counterfactual credit to OpenRLHF: the hook that makes the weights, and a launcher.

The hook overrides `RemoteExperienceMaker.compute_advantages_and_returns`: OpenRLHF's own actors score the spans, and
credit goes into `experience.advantages`, by which every loss of OpenRLHF multiplies its ratio. Actors with
`TreeScoring` score packed trees on their DeepSpeed engine; where they cannot, they get ordinary log-prob requests.
`python -m cfa_kernels.integrations.openrlhf` is `python -m openrlhf.cli.train_ppo_ray` with the hook and those actors.
"""

import argparse
import importlib
import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import CounterfactualConfig
from ..credit.config import as_config
from ..credit.deferred import Draws
from ..rows import Rows, pad_rows
from ..scoring.access import LogprobService, ModelAccess
from ..tree.packs import groups_within
from . import require
from .credit import ONE_RATIO, credit_rows, obstacles, refuse
from .workers import Share, Workers, choose_access, judge_share, ray_class, unmet_needs_of_host

OLDEST = "0.11.2"

if TYPE_CHECKING:
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker as _Maker
    from openrlhf.trainer.ray.launcher import BaseModelActor as _Actor
else:
    _Maker = _Actor = object


class TreeScoring(_Actor):
    """Add scoring of packed trees to OpenRLHF's actor, as `with_tree_scoring` does."""

    actor: Any
    strategy: Any
    _rank: int

    def score_trees(self, shares: Sequence[Share]) -> Any:
        """Score this process's share with the actor's DeepSpeed engine, see `judge_share`; all are called at once."""
        # `shares` are those of the processes that OpenRLHF gives the same data: one, or one for each of a ring's.
        self.actor.eval()
        try:
            return judge_share(self.actor.model, shares[self._rank % len(shares)])
        finally:
            self.actor.train()  # as OpenRLHF's own `forward` leaves it
            if _shares_devices(self.strategy.args):
                self.empty_cache()


with_tree_scoring = partial(ray_class, TreeScoring)
"""Makes a Ray actor class like its argument, OpenRLHF's `PolicyModelActor`, with `TreeScoring`."""


def _shares_devices(args: Any) -> bool:
    return bool(args.train.colocate_all or args.train.colocate_actor_ref)


def tree_obstacles(args: Any, group: Any) -> list[str]:
    """Name the settings with which OpenRLHF's actors cannot score trees, so that log-prob requests are sent."""
    actor = getattr(getattr(group, "ray_actor_type", None), "__ray_actor_class__", None)
    pieces = args.ds.tensor_parallel_size
    return obstacles(
        (pieces > 1, f"--ds.tensor_parallel_size {pieces}"),
        (getattr(args.ds, "deepcompile", False), "--ds.deepcompile"),
        (not hasattr(actor, "score_trees"), "an actor class without with_tree_scoring"),
    )


class CounterfactualMixin(_Maker):
    """Add credit to OpenRLHF's experience maker: `class Mine(CounterfactualMixin, RemoteExperienceMaker)`.

    Trees are scored at temperature 1, log-prob requests at the rollout temperature, which OpenRLHF's actor divides by.
    `credit/*` goes into `experience.info`. The trainer must set `global_step`, a key of all draws, before each step.

    Args:
        *args, **kwargs: the experience maker's own.
        counterfactual: configuration of credit; default the CF paper's. `control="off"` switches credit off.

    Raises `NotImplementedError` for settings that credit cannot be combined with, each named.
    """

    args: Any
    tokenizer: Any
    actor_model_group: Any

    def __init__(self, *args: Any, counterfactual: CounterfactualConfig | None = None, **kwargs: Any) -> None:
        require("openrlhf", OLDEST)
        self.counterfactual = as_config(counterfactual)
        super().__init__(*args, **kwargs)
        self._draws = Draws(self.args.train.seed)
        self.global_step = 0
        completions = self.args.rollout.n_samples_per_prompt
        self._unmet_needs = partial(unmet_needs_of_host, self.counterfactual, "OpenRLHF", completions)
        if self.counterfactual.control == "off":
            return
        gspo, kl = self.args.actor.policy_loss_type == "gspo", self.args.algo.kl
        images = getattr(self.args.data, "max_images_per_prompt", 0)
        refuse(
            [
                *self._unmet_needs(tree_obstacles(self.args, self.actor_model_group)),
                *obstacles(
                    (gspo, f"--actor.policy_loss_type gspo: {ONE_RATIO}; use ppo"),
                    (kl.init_coef > 0 and not kl.use_loss, "a KL term in the reward; use --algo.kl.use_loss"),
                    (images, f"images (--data.max_images_per_prompt {images})"),
                ),
            ]
        )

    @cached_property
    def access(self) -> ModelAccess:
        """Trees or log-prob requests; read first when the actors hold their models and can check them."""
        service = LogprobService(self._logprobs)
        if not self.counterfactual.asks_model:
            return service
        reasons = tree_obstacles(self.args, self.actor_model_group)
        return choose_access(Workers(self._score_trees, self._processes), service, reasons, self._unmet_needs)

    @torch.no_grad()
    def compute_advantages_and_returns(self, experiences: list[Any]) -> list[Any]:
        """Compute OpenRLHF's advantages and multiply credit into them; signed credit replaces them."""
        experiences = super().compute_advantages_and_returns(experiences)
        if self.counterfactual.control == "off":
            return experiences
        if any(inputs for experience in experiences for inputs in experience.mm_train_inputs or ()):
            refuse(["images (mm_train_inputs)"])
        rows = chain.from_iterable(map(_rows, experiences))
        firsts, prompts, completions, counted, advantages = zip(*rows, strict=True)
        index = torch.tensor([number for experience in experiences for number in experience.index])
        credited, figures = credit_rows(
            self.tokenizer,
            Rows(prompts, completions, index.tolist()),
            counted,
            advantages,
            self.access,
            config=self.counterfactual,
            seed=self._draws.key(self.global_step),
            groups=index // self.args.rollout.n_samples_per_prompt,  # OpenRLHF counts samples in the order of prompts
            rewards=torch.cat([experience.rewards for experience in experiences]),
        )
        remaining = iter(zip(firsts, credited, strict=True))
        for experience in experiences:
            experience.advantages = experience.advantages.clone()
            for into in experience.advantages:
                first, values = next(remaining)
                into[first : first + len(values)] = values
            samples = len(experience.advantages)
            experience.info |= {name: torch.full((samples,), figure) for name, figure in figures.items()}
        return experiences

    @property
    def _processes(self) -> int:
        return int(self.args.actor.num_nodes * self.args.actor.num_gpus_per_node)

    @property
    def _copies(self) -> int:
        # Processes that OpenRLHF gives the same data.
        return int(self.args.ds.ring_attn_size * self.args.ds.tensor_parallel_size)

    def _score_trees(self, shares: Sequence[Share]) -> list[Any]:
        """Send each process its share: an item for each effective actor, of the shares of its processes."""
        items = [shares[first : first + self._copies] for first in range(0, len(shares), self._copies)]
        references = self.actor_model_group.async_run_method_batch(method_name="score_trees", shares=items)
        return self._flatten_results(references, 1)

    def _logprobs(self, prompts: Sequence[Tensor], completions: Sequence[Tensor]) -> list[Tensor]:
        """Request log-probs of completions, in micro-batches as large as OpenRLHF's own, as many for each actor."""
        ids = [torch.cat(pair) for pair in zip(prompts, completions, strict=True)]
        copies = self._copies
        actors = self._processes // copies
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        if self.args.train.dynamic_batch_enable:
            lengths, most = [len(ids[i]) for i in order], self.args.rollout.max_tokens_per_gpu * copies
            groups = groups_within(lengths, most, lambda part: len(part) * max(part))
        else:
            groups = groups_within([1] * len(order), self.args.rollout.micro_batch_size)
        batches = [[order[i] for i in group] for group in groups]
        batches = batches[:1] * (-len(batches) % actors) + batches
        batches = [batch for first in range(actors) for batch in batches[first::actors]]
        masks = [pad_rows([torch.ones_like(ids[i]) for i in batch]) for batch in batches]
        references = self._dispatch_forward(
            self.actor_model_group,
            _shares_devices(self.args),
            sequences=[pad_rows([ids[i] for i in batch]) for batch in batches],
            action_mask=[mask[:, 1:] for mask in masks],
            attention_mask=masks,
        )
        rows = [row for logprobs in self._flatten_results(references, copies) for row in logprobs]
        by_sequence = dict(zip(chain.from_iterable(batches), rows, strict=True))
        return [by_sequence[i][len(prompts[i]) - 1 : len(ids[i]) - 1] for i in range(len(ids))]


def _rows(experience: Any) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor]]:
    """Yield samples without padding: first action position, prompt, completion (from the first sampled token on, with a
    tool's tokens), 1 on its sampled tokens, advantages."""
    # Action position t belongs to token t + 1.
    for sequence, attention, actions, advantages in zip(
        experience.sequences, experience.attention_mask, experience.action_mask, experience.advantages, strict=True
    ):
        length = int(attention.sum())
        first = int(actions.argmax()) if actions.any() else length - 1
        part = slice(first, length - 1)
        yield first, sequence[: first + 1], sequence[first + 1 : length], actions[part].long(), advantages[part]


def trainer_with_credit(config: CounterfactualConfig) -> Any:
    """Make OpenRLHF's synchronous trainer, a Ray actor class, with credit in its experience maker."""
    import ray
    from openrlhf.trainer.ppo_trainer import PPOTrainer
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    class CounterfactualPPOTrainer(PPOTrainer.__ray_actor_class__):  # type: ignore[name-defined, misc]
        """Trainer of OpenRLHF that makes an experience maker with credit."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            maker = type("CounterfactualExperienceMaker", (CounterfactualMixin, RemoteExperienceMaker), {})
            self.experience_maker = maker(
                self.actor_model_group,
                self.critic_model_group,
                self.reward_model_group,
                self.reference_model_group,
                self.kl_ctl,
                self.strategy,
                self.tokenizer,
                counterfactual=config,
            )

        def train_step(self, rollout_samples: Any, global_step: int) -> Any:
            self.experience_maker.global_step = global_step
            return super().train_step(rollout_samples, global_step)

        def fit(self, global_step: int = 0) -> None:
            _ = self.experience_maker.access  # the actors hold their models by now
            super().fit(global_step)

    return ray.remote(CounterfactualPPOTrainer)


def main() -> None:
    """Run `openrlhf.cli.train_ppo_ray` with credit: its arguments, and `--counterfactual` with options as JSON."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--counterfactual", type=json.loads, default={})
    ours, theirs = parser.parse_known_args()
    config = CounterfactualConfig.from_flat(ours.counterfactual)
    is_on = config.control != "off"
    is_async = is_on and any(option.startswith("--train.as") for option in theirs)  # abbreviations count
    # The experience maker knows OpenRLHF's own arguments and refuses more.
    refuse([*obstacles((is_async, "--train.async_enable")), *unmet_needs_of_host(config, "OpenRLHF", None, ())])
    require("openrlhf", OLDEST)
    if is_on:
        from openrlhf.trainer import ppo_trainer

        ppo_trainer.PPOTrainer = trainer_with_credit(config)
        if config.asks_model:
            from openrlhf.trainer.ray import ppo_actor

            ppo_actor.PolicyModelActor = with_tree_scoring(ppo_actor.PolicyModelActor)
    sys.argv[1:] = theirs
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")


if __name__ == "__main__":
    _main = importlib.import_module(__spec__.name).main  # Ray's processes find what is defined here by that name

    _main()
