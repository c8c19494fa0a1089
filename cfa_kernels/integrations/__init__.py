"""Counterfactual credit inside other trainers: one module per trainer, none of which is imported before you ask.

`integrations.trl`, `integrations.verl` and `integrations.openrlhf` need the package they are named after.
"""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version


def require(package: str, oldest: str) -> Version:
    """The installed version of `package`; `ImportError` naming the version needed if it is absent or older."""
    try:
        installed = Version(version(package))
    except PackageNotFoundError as error:
        raise ImportError(f"cfa_kernels.integrations.{package} needs {package}>={oldest}, which is not here") from error
    if installed < Version(oldest):
        raise ImportError(f"cfa_kernels.integrations.{package} needs {package}>={oldest}, found {installed}")
    return installed
