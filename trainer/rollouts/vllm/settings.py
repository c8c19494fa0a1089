"""Declare where a vLLM server is and how long it is waited for; names and defaults are TRL's where TRL has one."""

from dataclasses import dataclass, fields

_READ_BY = {"merge_adapters": ("transformers", "continuous"), "rollout_cache": ("transformers",)}
"""Settings of sampling in the training process that not every engine reads."""


@dataclass
class VllmSettings:
    """Settings of the vLLM engine."""

    vllm_server_base_url: str = "http://localhost:8000"
    """Address of the vLLM server."""
    vllm_group_port: int = 51216
    """Port on which trainer and server meet to pass weights by NCCL."""
    vllm_server_timeout: float = 240.0
    """Seconds to wait for the server before a run starts."""
    vllm_request_timeout: float = 600.0
    """Seconds to wait for the answer to one request: a completion, or an update of the weights."""

    def check_engine(self, engine: str) -> None:
        """Reject values outside their range, and settings that `engine` does not read, naming the setting."""
        own = {entry.name: ("vllm",) for entry in fields(VllmSettings)}
        for entry in fields(self):
            readers, value = (_READ_BY | own).get(entry.name, (engine,)), getattr(self, entry.name)
            if engine not in readers and value != entry.default:
                raise ValueError(
                    f"{entry.name}: rollout_engine={engine} does not read it, got {value!r}; leave it out, or take "
                    f"rollout_engine={' or '.join(readers)}"
                )
        if not self.vllm_server_base_url.startswith(("http://", "https://")):
            raise ValueError(
                "vllm_server_base_url must begin with http:// or https://, like http://localhost:8000, "
                f"got {self.vllm_server_base_url!r}"
            )
        for name in own.keys() - {"vllm_server_base_url"}:
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
