"""The versions that a record is valid for."""

import platform
from importlib.metadata import version

import pytest

#: The command that rewrites all records.
COMMAND = "python -m tests.guards --write"


def version_of(package: str) -> str:
    """The installed version of a package, or the minor version of ``"Python"``."""
    if package == "Python":
        return platform.python_version().rpartition(".")[0]
    return version(package).partition("+")[0]


def versions_of(*packages: str) -> str:
    """The installed versions of some packages in one line."""
    return ", ".join(f"{package} {version_of(package)}" for package in packages)


def skip_unless_recorded(recorded: str, here: str) -> None:
    """Skips a test whose record is of other versions than the installed ones; they are as of :func:`versions_of`."""
    if recorded != here:
        pytest.skip(f"The record is valid for {recorded}; installed are {here}.")
