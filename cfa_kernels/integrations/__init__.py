"""Adapters of host trainers. Each module here knows the library and one host, and is imported on request."""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version


def require(package: str, oldest: str) -> Version:
    """Return the installed version of a trainer's package, which the module of its name here needs.

    Raises:
        ImportError: the package is absent or older than `oldest`.
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
