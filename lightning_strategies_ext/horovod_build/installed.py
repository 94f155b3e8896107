"""Checks of the installed Horovod that import neither Horovod nor torch.

The checks only read files, so a strategy can run them at any time.

Limitations: Whether the C extension can be loaded is not checked; the smoke test of ``install-horovod`` does that.
"""

import json
import re
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_strategies_ext.horovod_build.patches import REVISION

COMMAND = "python -m lightning_strategies_ext install-horovod"
#: File in the dist-info directory of wheels that this package has built, with :meth:`.build_key.BuildKey.as_json`.
MARKER = "lightning_strategies_ext.json"


def horovod_problem() -> str | None:
    """Returns why ``import horovod.torch`` would fail, with the fix; None if no problem is found.

    Example::

        if (problem := horovod_problem()) is not None:
            raise RuntimeError(problem)
    """
    package, torch = package_directory("horovod"), torch_version()
    if torch is None:
        return "PyTorch is not installed, but Horovod is built for an installed PyTorch. Install torch first."
    if package is None:
        return f"Horovod is not installed. Build it for this PyTorch with: {COMMAND}"
    command = _command()
    if not (package / "torch" / f"mpi_lib_v2{sysconfig.get_config_var('EXT_SUFFIX')}").exists():
        return f"The installed Horovod was built without PyTorch, or for another Python. Build it with: {command}"
    built_for = built_for_torch_version(package)
    if built_for is not None and built_for != torch:
        return (
            f"The installed Horovod was built for torch {built_for}, but the installed torch is {torch}. Build it"
            f" with: {command}"
        )
    return None


def outdated_build_warning() -> str | None:
    """Returns a warning if an earlier version of this package has built Horovod without a current fix; else None."""
    content = marker()
    if content is None or content.get("fixes", REVISION) >= REVISION:
        return None
    return (
        "The installed Horovod was built by an earlier version of lightning-strategies-ext, and a rank may hang in it"
        f" after another rank is lost. Rebuild it with: {_command()}"
    )


def torch_version() -> str | None:
    """Returns the version of torch with its local part (``2.13.0+cpu``), or None if torch is not installed.

    It is read from torch's ``version.py``, because the metadata of the wheels on PyPI lack the local part, and an
    import of torch takes seconds.
    """
    package = package_directory("torch")
    if "torch" in sys.modules or package is None:
        version = getattr(sys.modules.get("torch"), "__version__", None)
        return None if version is None else str(version)
    return value_in(package / "version.py", r"^__version__\s*=\s*['\"]([^'\"]+)")


def torch_cuda_version() -> str | None:
    """Returns the CUDA version that torch was built with, or None."""
    package = package_directory("torch")
    return None if package is None else value_in(package / "version.py", r"^cuda\b.*=\s*['\"]([^'\"]+)")


def built_for_torch_version(package: Path) -> str | None:
    """Returns the torch version that an installed Horovod was built for, from its build metadata; None if unknown."""
    try:
        return str(json.loads((package / "metadata.json").read_text())["pytorch"])
    except (OSError, ValueError, KeyError):
        return None


def marker() -> dict[str, Any] | None:
    """Returns the content of the installed Horovod's marker; None if not installed or not built by this package."""
    try:
        text = distribution("horovod").read_text(MARKER)
        content = None if text is None else json.loads(text)
    except (PackageNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def package_directory(name: str) -> Path | None:
    """Returns the directory of a top-level package without importing it, or None."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def value_in(file: Path, pattern: str) -> str | None:
    """Returns the first group of the pattern's first match in a file, or None."""
    try:
        match = re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None


def _command() -> str:
    # Includes the options of the installed build, so that a rebuild keeps MPI and NCCL.
    content = marker()
    return " ".join([COMMAND, *(f"--{name}" for name in ("mpi", "nccl") if content and content.get(name))])
