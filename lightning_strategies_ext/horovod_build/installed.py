"""What can be said of the installed Horovod without importing it, its C extension or torch.

It reads files only, so a strategy can ask at any time. It does not promise that the extension loads: that is what the
proof of the ``install-horovod`` command is for.
"""

import json
import re
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_strategies_ext.horovod_build.fixes import REVISION

COMMAND = "python -m lightning_strategies_ext install-horovod"
#: Stands in the dist-info directory of wheels that this package built; its content is :meth:`.key.BuildKey.as_json`.
MARKER = "lightning_strategies_ext.json"


def horovod_problem() -> str | None:
    """Says why ``import horovod.torch`` would not work here, and what to do; None if it would.

    Example::

        if (problem := horovod_problem()) is not None:
            raise RuntimeError(problem)
    """
    package, torch = package_directory("horovod"), torch_version()
    if torch is None:
        return "PyTorch is not installed, and Horovod is built for an installed PyTorch. Install torch first."
    if package is None:
        return f"Horovod is not installed. Build it for this PyTorch with: {COMMAND}"
    command = _command()
    if not (package / "torch" / f"mpi_lib_v2{sysconfig.get_config_var('EXT_SUFFIX')}").exists():
        return f"The installed Horovod was built without PyTorch, or for another Python. Build it with: {command}"
    built_for = built_for_torch(package)
    if built_for is not None and built_for != torch:
        return f"The installed Horovod was built for torch {built_for}, and torch is {torch}. Build it with: {command}"
    return None


def what_is_not_fixed() -> str | None:
    """Says what an earlier version of this package has not fixed in the Horovod that it built; None if nothing."""
    content = marker()
    if content is None or content.get("fixes", REVISION) >= REVISION:
        return None
    return (
        "The installed Horovod was built by an earlier version of lightning-strategies-ext, and a rank may hang in it"
        f" for ever when another one is lost. Build it again with: {_command()}"
    )


def torch_version() -> str | None:
    """The version of torch with its local part (``2.13.0+cpu``), or None if torch is not installed.

    The metadata of the wheels on PyPI lack the local part, and importing torch takes seconds: so its file is read.
    """
    package = package_directory("torch")
    if "torch" in sys.modules or package is None:
        version = getattr(sys.modules.get("torch"), "__version__", None)
        return None if version is None else str(version)
    return value_in(package / "version.py", r"^__version__\s*=\s*['\"]([^'\"]+)")


def torch_cuda_version() -> str | None:
    """The CUDA version that torch was built with, or None."""
    package = package_directory("torch")
    return None if package is None else value_in(package / "version.py", r"^cuda\b.*=\s*['\"]([^'\"]+)")


def built_for_torch(package: Path) -> str | None:
    """The torch that an installed Horovod was built for, from what its own build wrote down."""
    try:
        return str(json.loads((package / "metadata.json").read_text())["pytorch"])
    except (OSError, ValueError, KeyError):
        return None


def marker() -> dict[str, Any] | None:
    """What our build wrote into the installed Horovod; None if it is not installed or not of our making."""
    try:
        text = distribution("horovod").read_text(MARKER)
        content = None if text is None else json.loads(text)
    except (PackageNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def package_directory(name: str) -> Path | None:
    """Where a top-level package lies, found without importing it."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def value_in(file: Path, pattern: str) -> str | None:
    """The first group of the pattern's first match in a file, or None."""
    try:
        match = re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None


def _command() -> str:
    # With the options that the installed Horovod was built with, so that the advice does not take MPI from a user.
    content = marker()
    return " ".join([COMMAND, *(f"--{name}" for name in ("mpi", "nccl") if content and content.get(name))])
