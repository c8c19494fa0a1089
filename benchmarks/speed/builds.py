"""Read Triton kernels as the driver loaded them, which compiling ahead of time cannot show."""

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from cfa_kernels import ops


def op_modules() -> list[ModuleType]:
    """Every module of `cfa_kernels.ops`."""
    return [importlib.import_module(f"{ops.__name__}.{module.name}") for module in pkgutil.iter_modules(ops.__path__)]


def kernels(modules: list[ModuleType]) -> dict[str, Any]:
    """The functions under `@triton.jit` that these modules define and that are launched, by name."""
    result = {}
    for module in modules:
        for name, value in vars(module).items():
            own = getattr(getattr(value, "fn", None), "__module__", None) == module.__name__
            if own and name.endswith("_kernel"):
                result[name] = value
    return result


def loaded_builds(modules: list[ModuleType]) -> dict[str, dict[str, Any]]:
    """Every build that this process has launched, by kernel and hash.

    Triton keeps builds per kernel and device (`JITFunction.device_caches`); a launched one knows what the driver says
    of it: `registers` of a lane, `spilled_words` (32 bits each) of local memory of a lane, `shared_bytes` of a program.
    In the interpreter there are none.
    """
    return {
        f"{name} {build.hash[:12]}": {
            "name": name,
            "registers": build.n_regs,
            "spilled_words": build.n_spills,
            "shared_bytes": build.metadata.shared,
            "warps": build.metadata.num_warps,
        }
        for name, kernel in kernels(modules).items()
        for build in _builds(kernel)
        if getattr(build, "n_regs", None) is not None
    }


def _builds(kernel: Any) -> Iterator[Any]:
    for caches in getattr(kernel, "device_caches", {}).values():
        yield from caches[0].values()
