"""User cache: files that were built on this machine, outside of any virtual environment.

Processes of the user load these files. No file is read from, or written to, a path that another user of the machine
could have written: each file and directory on the path must belong to this user or to root, and must not be writable by
its group or by others, as OpenSSH requires of a user's keys.
"""

import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

#: Environment variable with another directory for the cache.
CACHE_VARIABLE: Final = "LIGHTNING_STRATEGIES_EXT_CACHE_DIR"


class UnsafePathError(PermissionError):
    """Raised for a file or a directory that another user could have written."""


def directory(kind: str) -> Path:
    """Returns the directory for one kind of files, which need not exist.

    Raises:
        FileNotFoundError: If this user has no home directory, and no environment variable names another directory.
    """
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser() / kind
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "lightning-strategies-ext" / kind
    with suppress(RuntimeError):
        if (home := Path.home()).is_dir():  # root could create a missing one
            return home / ".cache" / "lightning-strategies-ext" / kind
    raise FileNotFoundError(f"this user has no home directory; set {CACHE_VARIABLE} to a directory")


def create(path: Path) -> Path:
    """Creates a directory and its missing parents, for this user alone, whatever the umask.

    Returns:
        The path without symbolic links.

    Raises:
        UnsafePathError: If other users can write to the directory or to one of its parents.
        OSError: If it cannot be created.
    """
    for missing in reversed([each for each in (path, *path.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    return safe_path(path)


def store_file(file: Path, as_file: Path) -> None:
    """Copies a file into a safe directory, atomically: no process reads a part of the copy.

    Raises:
        OSError: If it cannot be copied.
    """
    descriptor, partial = tempfile.mkstemp(prefix=f".{as_file.name}-", dir=as_file.parent)
    try:
        with open(file, "rb") as source, os.fdopen(descriptor, "wb") as copy:
            shutil.copyfileobj(source, copy)
        os.replace(partial, as_file)
    except BaseException:
        os.unlink(partial)
        raise


def safe_path(path: Path) -> Path:
    """Checks that no other user can have written or replaced a file or a directory.

    Returns:
        The path without symbolic links. Use this path: another user may be able to change a link.

    Raises:
        UnsafePathError: If the file, or a directory on its path, belongs to or is writable by another user.
        OSError: If the path does not exist or cannot be read.
    """
    path = path.resolve(strict=True)
    for part in (path, *path.parents):
        status = os.stat(part)
        if status.st_uid not in (os.geteuid(), 0):
            raise UnsafePathError(f"{part} belongs to another user (id {status.st_uid})")
        is_shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        # In a directory with the sticky bit, such as /tmp, other users cannot replace files of this user.
        if is_shared and not (part != path and status.st_mode & stat.S_ISVTX):
            raise UnsafePathError(f"{part} is writable by other users; run `chmod go-w {part}`")
    return path
