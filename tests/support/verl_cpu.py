"""A platform for verl of a CPU and gloo, for which it has none; registered where this module is imported."""

import os
import types
from typing import Any

os.environ["VERL_PLATFORM"] = "cpu"

from verl.models.transformers import monkey_patch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

monkey_patch.is_trl_available = lambda: False  # verl 0.9.1 patches a class that trl 1.16 does not have


class NoDevice(types.ModuleType):
    """What verl asks of `torch.cuda`; nothing is done."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: {"mem_get_info": (0, 1), "get_device_name": "CPU"}.get(name, 0)


@PlatformRegistry.register("cpu")
class PlatformCPU(PlatformCUDA):
    device_name = vendor_name = "cpu"
    device_module = NoDevice("no_device")
    is_available = is_platform_available = lambda self, *_, **__: True
    current_device = lambda self: "cpu"  # noqa: E731
    communication_backend_name = lambda self: "gloo"  # noqa: E731
    set_device = synchronize = empty_cache = lambda self, *_: None
