"""Declare the settings of sampling; those of vLLM have TRL's names and defaults."""

from dataclasses import dataclass, fields
from typing import Literal


@dataclass
class RolloutSettings:
    """How completions are sampled, in training and in evaluation alike."""

    rollout_engine: Literal["transformers", "vllm"] = "transformers"
    """Engine that samples: transformers, in the training process, or a vLLM server, reached through TRL's client."""
    merge_adapters: Literal["auto", "always", "never"] = "auto"
    """Merge adapters into the weights while sampling; the weights come back to the bit. If they cannot be merged
    (quantised or tied weights, an adapter that PEFT does not merge), auto samples with them beside the weights and says
    so, always refuses. Merged bfloat16 weights are rounded: sampling/gap shows by how much."""
    rollout_cache: Literal["auto", "static", "dynamic"] = "auto"
    """Keys and values of what is being sampled: static has a fixed size, so that a decoding step on a GPU is one CUDA
    graph, compiled at first use; auto takes it on a GPU for models that transformers can compile."""
    vllm_server_base_url: str = "http://localhost:8000"
    """Address of the vLLM server."""

    def check_engine(self) -> None:
        """Reject values outside their range, and settings that the engine does not read, naming the setting."""
        readers = {"merge_adapters": "transformers", "rollout_cache": "transformers"}
        readers |= {entry.name: "vllm" for entry in fields(RolloutSettings) if entry.name.startswith("vllm_")}
        for entry in fields(self):
            reader, value = readers.get(entry.name, self.rollout_engine), getattr(self, entry.name)
            if reader != self.rollout_engine and value != entry.default:
                raise ValueError(
                    f"{entry.name}: rollout_engine={self.rollout_engine} does not read it, got {value!r}; leave it "
                    f"out, or take rollout_engine={reader}"
                )
        if not self.vllm_server_base_url.startswith(("http://", "https://")):
            raise ValueError(
                "vllm_server_base_url must begin with http:// or https://, like http://localhost:8000, "
                f"got {self.vllm_server_base_url!r}"
            )
