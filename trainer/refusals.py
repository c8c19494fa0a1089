"""Refuse settings that contradict each other, or that several processes cannot follow: one table."""

import os
from typing import TYPE_CHECKING

import torch

from cfa_kernels.estimators.base import EXTERNAL
from cfa_kernels.loss.checks import weights_sequences
from cfa_kernels.scoring.access import GRADIENTS

from .rewards.built_in import BUILT_IN
from .settings import GENERATED, TrainSettings

if TYPE_CHECKING:
    from .config import TrainConfig


def refuse(config: "TrainConfig", processes: int = 1) -> None:
    """Raise `ValueError` with the sentence of the first row that holds."""
    table = {**_contradictions(config), **(_of_processes(config, processes) if processes > 1 else {})}
    for sentence, holds in table.items():
        if holds:
            raise ValueError(sentence)


def _contradictions(c: "TrainConfig") -> dict[str, bool]:
    credit, high, url = c.counterfactual(), c.importance_sampling_clip_max, c.vllm_server_base_url
    weighing = {
        f"credit={c.credit}": credit.control != "off",
        "compare_and_correct": c.compare_and_correct > 0,
        "importance_sampling_clip_max": high is not None and c.importance_sampling_mode.startswith("token"),
    }
    weighs = [name for name, does in weighing.items() if does]
    unfit = [name for name in c.reward_funcs if name in BUILT_IN and c.kind not in BUILT_IN[name].kinds]
    judged = " or ".join(BUILT_IN[unfit[0]].kinds) if unfit else ""
    return {
        f"num_generations must be at least 2 for a group to compare, got {c.num_generations}": c.num_generations < 2,
        f"generation_batch_size must be a multiple of num_generations, got {c.generation_batch_size} and "
        f"{c.num_generations}": c.generation_batch_size % max(c.num_generations, 1) > 0,
        "importance_sampling_mode is read with importance_sampling_clip_max only, which is None": (
            c.importance_sampling_mode != "token_truncate" and high is None
        ),
        f"estimator: {c.estimator} needs importances from a caller; give 'module:name'": EXTERNAL in credit.needs,
        f"importance_sampling_level must be token or sequence_token with {' and '.join(weighs)}, got sequence: a "
        "completion has one ratio there, so that only the sum of its tokens' weights acts": (
            weights_sequences(c.loss_type, c.importance_sampling_level) and bool(weighs)
        ),
        f"vllm_server_base_url must begin with http:// or https://, got {url!r}": (
            not url.startswith(("http://", "https://"))
        ),
        "vllm_server_base_url: only rollout_engine=vllm reads it; name both or neither": (
            c.rollout_engine != "vllm" and url != TrainSettings.vllm_server_base_url
        ),
        "environment: compare_and_correct writes corrections that no environment answers; name one of them": (
            c.environment is not None and c.compare_and_correct > 0
        ),
        "reward_funcs must name at least one function, got none": not c.reward_funcs,
        f"reward_weights: {len(c.reward_weights)} weights for {len(c.reward_funcs)} reward_funcs; give one for each, "
        "or none at all": bool(c.reward_weights) and len(c.reward_weights) != len(c.reward_funcs),
        f"reward_funcs: {''.join(unfit[:1])} judges rows of {judged}, and eval_reward {c.grader} {c.kind}": bool(unfit),
        "dataset: 'generated' has no tests; name a file or hub data set with MBPP's columns": (
            c.dataset == GENERATED and c.kind == "mbpp"
        ),
    }


def _of_processes(c: "TrainConfig", processes: int) -> dict[str, bool]:
    problems, device = c.generation_batch_size // c.num_generations, c.precision.device
    place, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    on_gpu, in_pieces = device.type == "cuda", c.parallel == "fsdp2"
    return {
        f"generation_batch_size={c.generation_batch_size} is {problems} problems, which {processes} processes cannot "
        f"share equally; use a multiple of {processes} problems": problems % processes > 0,
        f"rollout_engine: {c.rollout_engine} serves one process, and there are {processes}; take transformers": (
            c.rollout_engine != "transformers"
        ),
        f"compare_and_correct: runs in one process, and there are {processes}": c.compare_and_correct > 0,
        f"device: {device} is one GPU, and there are {processes} processes; leave it out or say cuda": (
            on_gpu and device.index is not None
        ),
        f"device: process {place} of this machine has no GPU; it has {gpus}; start {gpus}": on_gpu and place >= gpus,
        f"estimator: {c.estimator} takes gradients through a model that is whole in one process, which "
        "parallel=fsdp2 does not keep; take parallel=ddp": in_pieces and GRADIENTS in c.counterfactual().needs,
    }
