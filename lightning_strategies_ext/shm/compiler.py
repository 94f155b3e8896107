"""The compiler: what turns :data:`SOURCES` into a library, at first use on a machine or when a wheel is built.

The build hook runs this file by itself, so it imports nothing of this package.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("all_reduce.c")
#: All that is in the library.
SOURCES: Final = (SOURCE, SOURCE.with_name("at_fork.c"))
# No contraction of operations, and sums that wrap: the bits must be those that torch computes.
FLAGS: Final = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-pthread", "-fwrapv", "-ffp-contract=off")
_COMPILERS: Final = ("cc", "gcc", "clang")
_TIMEOUT_S: Final = 120.0


class NotCompiledError(Exception):
    """Raised where there is no compiled library; says why."""


def command() -> list[str]:
    """What calls the C compiler: the environment variable ``CC``, else the first of the usual names that is there.

    Raises:
        NotCompiledError: If there is none.
    """
    named = shlex.split(os.environ.get("CC", ""))
    for words in [named] if named else [[name] for name in _COMPILERS]:
        if shutil.which(words[0]):
            return words
    raise NotCompiledError(f"there is no C compiler ({' '.join(named) or ', '.join(_COMPILERS)})")


def compile_library(compiler: Sequence[str], into: Path, environment: Mapping[str, str] | None = None) -> None:
    """Compiles the library.

    Args:
        compiler: The words that call the compiler.
        into: The file to make.
        environment: Variables for the compiler, in place of those of this process.

    Raises:
        NotCompiledError: If the compiler does not run, or fails.
    """
    words = [*compiler, *FLAGS, "-o", str(into), *map(str, SOURCES)]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiledError(f"{compiler[0]} does not run ({error})") from error
    if done.returncode:
        raise NotCompiledError(f"{compiler[0]} fails: {done.stderr.strip()[-300:] or done.returncode}")
