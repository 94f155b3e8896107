"""The versions that a record is valid for."""

import platform
from importlib.metadata import PackageNotFoundError, version

import pytest

#: The command that rewrites all records.
COMMAND = "python -m tests.guards --write"


def version_of(package: str) -> str:
    """Returns the installed version of a package, or the minor version of ``"Python"``."""
    if package == "Python":
        return platform.python_version().rpartition(".")[0]
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "(not installed)"


def versions_of(*packages: str) -> str:
    """Returns the installed versions of some packages in one line."""
    return ", ".join(f"{package} {version_of(package)}" for package in packages)


def skip_unless_recorded(recorded: str, installed: str) -> None:
    """Skips a test whose record is not valid for the installed versions.

    Args:
        recorded: The versions that the record is valid for.
        installed: The installed versions, see :func:`versions_of`.
    """
    if recorded != installed:
        pytest.skip(f"The record is valid for {recorded}; installed are {installed}.")
