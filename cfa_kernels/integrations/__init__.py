"""Adapters of host trainers. Each module here knows the public API and one host.

`integrations.trl`, `integrations.verl` and `integrations.openrlhf` need the package that they are named after, and are
imported only on request.
"""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version


def require(package: str, oldest: str) -> Version:
    """Return the installed version of a trainer's package; raise if it is absent or too old.

    Args:
        package: name of the package, and of the module here that needs it.
        oldest: oldest version that works.

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
