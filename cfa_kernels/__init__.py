"""Counterfactual credit assignment for the reinforcement learning of language models.

Mask a span of the reasoning, measure how the log-probability of the answer moves, weigh each token's clipped policy
loss by that. The names of `__init__.pyi` are the public API; everything else may change. Each is imported when it is
first used, so that `import cfa_kernels` brings neither torch nor transformers, and kernels and losses do without
transformers.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_DECLARED = ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
_MODULES = {one.name: node.module for node in _DECLARED if isinstance(node, ast.ImportFrom) for one in node.names}
_PACKAGES = sorted({module.partition(".")[0] for module in _MODULES.values() if module} | {"tree"})

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name, or a package, when it is first used."""
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
