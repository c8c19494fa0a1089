"""Declare the settings of sampling; they are flags and YAML names of the training program like all others."""

from dataclasses import dataclass
from typing import Literal

from trainer.rollouts.vllm.settings import VllmSettings


@dataclass
class RolloutSettings(VllmSettings):
    """How completions are sampled, in training and in evaluation alike."""

    rollout_engine: Literal["transformers", "continuous", "vllm"] = "transformers"
    """What samples: transformers' generate or its continuous batching, in the training process, or a vLLM server,
    reached through TRL's client."""
    merge_adapters: Literal["auto", "always", "never"] = "auto"
    """Merge adapters into the weights while sampling; the weights come back to the bit. Where they cannot be merged
    (quantised or tied weights, an adapter that PEFT does not merge), auto samples with them beside the weights and says
    so, always refuses. Merged bfloat16 weights are rounded: sampling/gap shows by how much."""
    rollout_cache: Literal["auto", "static", "dynamic"] = "auto"
    """Keys and values of what is being sampled: static has a fixed size, so that a decoding step on a GPU is one CUDA
    graph, compiled at first use; auto takes it on a GPU for models that transformers can compile."""
