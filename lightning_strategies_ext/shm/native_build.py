"""Build of the native library, once per machine and version.

A wheel for this machine contains the library. Otherwise the first process that needs the library compiles it, with a C
compiler and without headers of Python or torch. It is stored in the user's cache, under a name that identifies
everything it depends on. If there is no cache directory, or other users can write to it, each process compiles its own
library.
"""

import ctypes
import hashlib
import os
import platform
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from lightning_strategies_ext._system import user_cache
from lightning_strategies_ext.shm import compiler
from lightning_strategies_ext.shm.compiler import FLAGS, SOURCE, SOURCES, CompilerError, NativeLibraryError

#: Environment variable; with the value 0, Python code replaces the native library.
NATIVE_VARIABLE: Final = "LIGHTNING_STRATEGIES_EXT_SHM_NATIVE"
#: Path of the library in a wheel for one platform.
IN_WHEEL: Final = SOURCE.with_suffix(".so")
#: Errors of compilers, by their commands. A compiler that fails runs once in a process, not once per process group.
_problems: dict[tuple[str, ...], str] = {}


class Library(NamedTuple):
    """A loaded native library.

    Attributes:
        functions: The library.
        uncached_reason: Why each process compiles the library; empty if it is stored for later processes.
    """

    functions: ctypes.CDLL
    uncached_reason: str


@cache
def library() -> Library:
    """Loads the library of the wheel, or else the stored one; compiles it if necessary. Later calls return the same.

    Raises:
        NativeLibraryError: If the user has disabled the library, there is no compiler, or the compiler fails.
    """
    if os.environ.get(NATIVE_VARIABLE, "1") == "0":
        raise NativeLibraryError(f"{NATIVE_VARIABLE}=0")
    if IN_WHEEL.exists():
        try:
            return Library(_load(IN_WHEEL), "")
        except NativeLibraryError:
            pass  # it was built for another C library than that of this system, or for another version
    uncached_reason = ""
    cached: Path | None = None
    try:
        cached = user_cache.create(user_cache.directory("shm")) / f"all_reduce-{_key()}.so"
        return Library(_load(user_cache.safe_path(cached)), "")
    except FileNotFoundError as error:
        uncached_reason = "" if cached is not None else str(error)
    except NativeLibraryError:
        pass  # the file is not a library: compile it again
    except OSError as error:
        cached, uncached_reason = None, str(error)
    return _compile(cached, uncached_reason)


def _compile(cached: Path | None, uncached_reason: str) -> Library:
    command = compiler.command()
    key = tuple(command)
    if key not in _problems:
        try:
            return _compile_with(command, cached, uncached_reason)
        except CompilerError as error:
            _problems[key] = str(error)
    raise NativeLibraryError(_problems[key])


def _compile_with(command: Sequence[str], cached: Path | None, uncached_reason: str) -> Library:
    try:
        with tempfile.TemporaryDirectory() as directory:
            made = Path(directory, "all_reduce.so")
            compiler.compile_library(command, made)
            if cached is not None:
                try:
                    user_cache.store_file(made, cached)
                    return Library(_load(cached), "")
                except OSError as error:
                    uncached_reason = str(error)
            return Library(_load(made), uncached_reason)
    except OSError as error:
        raise NativeLibraryError(f"there is no directory for the compiled library ({error})") from error


def _key() -> str:
    parts = [
        *(source.read_text() for source in SOURCES),
        *FLAGS,
        platform.system(),
        platform.machine(),
        *platform.libc_ver(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _load(path: Path) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeLibraryError(f"{path} cannot be loaded ({error})") from error
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name, result, arguments in (
        ("all_reduce_group_bytes", size, []),
        ("all_reduce_open", None, [pointer, number, number, pointer, size, size, pointer, ctypes.c_char_p]),
        ("all_reduce_begin", None, [pointer, pointer, size, number, number, size, pointer, ctypes.c_uint64]),
        ("all_reduce_call", ctypes.c_uint64, [pointer, number]),
        ("all_reduce_identity", ctypes.c_uint64, [pointer, number]),
        ("all_reduce_advance", number, [pointer, ctypes.c_uint64]),
        ("all_reduce_awaits", number, [pointer, number]),
        ("all_reduce_fall_asleep", number, [pointer]),
        ("all_reduce_wake_up", None, [pointer]),
        ("at_fork_hold", number, [pointer, pointer, pointer]),
    ):
        try:
            function = getattr(loaded, name)
        except AttributeError as error:
            raise NativeLibraryError(f"{path} is the library of another version ({error})") from error
        function.restype, function.argtypes = result, arguments
    return loaded
