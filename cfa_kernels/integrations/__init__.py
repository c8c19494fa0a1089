"""Counterfactual credit inside other trainers: one module per trainer, none of which is imported before you ask.

`integrations.trl`, `integrations.verl` and `integrations.openrlhf` need the package they are named after.
"""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version


def require(package: str, oldest: str) -> Version:
    """Return the installed version of a trainer's package, or refuse it.

    Args:
        package: its name, of the package and of the module here that needs it.
        oldest: the first version that will do.

    Returns:
        The version, for comparisons.

    Raises:
        ImportError: the package is absent or older; names the version needed and the one found.
    """
    try:
        installed = Version(version(package))
    except PackageNotFoundError as error:
        raise ImportError(
            f"cfa_kernels.integrations.{package} needs {package}>={oldest}, which is not installed"
        ) from error
    if installed < Version(oldest):
        raise ImportError(f"cfa_kernels.integrations.{package} needs {package}>={oldest}, found {installed}")
    return installed
