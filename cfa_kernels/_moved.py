"""Import modules that have moved by their former names, with a `DeprecationWarning`, for one release."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

MOVED = {
    "code_text": ("text.python_code",),
    "fused_modules": ("hf.liger",),
    "mediation": ("estimators.total_effects",),
    "packed_loss": ("scoring.training_forward", "losses.ragged"),
    "solution_text": ("text.patterns", "text.arithmetic", "text.latex"),
}
"""Former names that the documentation gave, and where their contents are now."""


class _FormerNames(MetaPathFinder, Loader):
    """Find a module by its former name and fill it with what is in its place now."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        return spec_from_loader(fullname, self) if package == __package__ and name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        homes = [f"{__package__}.{home}" for home in MOVED[module.__name__.rpartition(".")[2]]]
        warnings.warn(
            f"{module.__name__} has moved and will be gone in the next release: import from {__package__} what is "
            f"public, the rest from {', '.join(homes)}",
            DeprecationWarning,
            stacklevel=2,  # the line that imports: frames of importlib do not count
        )
        for home in homes:
            contents = vars(import_module(home))
            module.__dict__.update({name: value for name, value in contents.items() if not name.startswith("__")})


sys.meta_path.append(_FormerNames())
