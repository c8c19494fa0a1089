"""Adapters of host trainers. A module here knows the public API and one host; code that adapts a host belongs here.

`integrations.trl`, `integrations.verl` and `integrations.openrlhf` need the package they are named after, and are
imported only when asked for.
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
    needs = f"cfa_kernels.integrations.{package} needs {package}>={oldest}"
    remedy = f"pip install 'cfa_kernels[{package}]', see docs/{package}.md"
    try:
        installed = Version(version(package))
    except PackageNotFoundError as error:
        raise ImportError(f"{needs}, which is not installed; {remedy}") from error
    if installed < Version(oldest):
        raise ImportError(f"{needs}, found {installed}; {remedy}")
    return installed
