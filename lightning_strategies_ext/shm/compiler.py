"""Compiler: builds the native library from :data:`SOURCES`, at first use on a machine or for a wheel.

The build hook runs this file alone, so it imports nothing from this package.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("all_reduce.c")
#: Sources of the native library.
SOURCES: Final = (SOURCE, SOURCE.with_name("at_fork.c"))
# Results must be bitwise equal to those of torch: no contraction of operations, and integers wrap around.
FLAGS: Final = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-pthread", "-fwrapv", "-ffp-contract=off")
_COMPILERS: Final = ("cc", "gcc", "clang")
_TIMEOUT_S: Final = 120.0
#: Maximum characters of a compiler's output in a message.
_MAX_QUOTED: Final = 300


class NativeLibraryError(Exception):
    """Raised when no native library is available. The message states why."""


class CompilerError(NativeLibraryError):
    """Raised when the compiler rejects the sources or its options, as it would again."""


def command() -> list[str]:
    """Returns the command of the C compiler: the environment variable ``CC``, else the first usual name that exists.

    Raises:
        NativeLibraryError: If no compiler is found.
    """
    named = shlex.split(os.environ.get("CC", ""))
    for parts in [named] if named else [[name] for name in _COMPILERS]:
        if shutil.which(parts[0]):
            return parts
    raise NativeLibraryError(f"there is no C compiler ({' '.join(named) or ', '.join(_COMPILERS)})")


def compile_library(compiler: Sequence[str], into: Path, environment: Mapping[str, str] | None = None) -> None:
    """Compiles the native library.

    Args:
        compiler: Command of the compiler.
        into: Path of the library to create.
        environment: Environment variables of the compiler; those of this process if None.

    Raises:
        CompilerError: If the compiler fails.
        NativeLibraryError: If the compiler does not run, or a signal has killed it.
    """
    parts = [*compiler, *FLAGS, "-o", str(into), *map(str, SOURCES)]
    try:
        done = subprocess.run(
            parts, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeLibraryError(f"{compiler[0]} does not run ({error})") from error
    if done.returncode:
        kind = CompilerError if done.returncode > 0 else NativeLibraryError  # a signal may have killed it
        raise kind(f"{compiler[0]} fails: {_last_lines(done.stderr.strip()) or done.returncode}")


def _last_lines(text: str) -> str:
    """Returns the last whole lines of a text, or the beginning of a long last line; for a message."""
    if len(text) > _MAX_QUOTED:
        text = text[-_MAX_QUOTED - 1 :].partition("\n")[2] or text.rpartition("\n")[2][:_MAX_QUOTED]
    return text
