"""Where what was built on this machine is kept, outside of any environment.

What is kept is loaded into the processes of whoever runs us. So nothing is taken from, or put into, a place that
another user of the machine could have written to: each file and directory on the way must belong to this user or to
root, and must not be writable by its group or by others, as OpenSSH asks of a user's keys.
"""

import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

#: Names another place.
CACHE_VARIABLE: Final = "LIGHTNING_STRATEGIES_EXT_CACHE"


class UnsafePathError(PermissionError):
    """Raised for a file or a directory that another user could have written."""


def directory(kind: str) -> Path:
    """The directory of one kind of things, which need not exist.

    Raises:
        FileNotFoundError: If this user has no home directory, and no other place is named.
    """
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser() / kind
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "lightning-strategies-ext" / kind
    with suppress(RuntimeError):
        if (home := Path.home()).is_dir():  # root could create a missing one
            return home / ".cache" / "lightning-strategies-ext" / kind
    raise FileNotFoundError(f"this user has no home directory; {CACHE_VARIABLE} can name another place")


def create(path: Path) -> Path:
    """Makes a directory, and those that it is in; for this user alone, whatever the umask, if they are not there yet.

    Returns:
        The directory without symbolic links, see :func:`safe_path`.

    Raises:
        UnsafePlaceError: If others can write to it, or to one that it is in.
        OSError: If it cannot be made.
    """
    for missing in reversed([each for each in (path, *path.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    return safe_path(path)


def store_file(file: Path, as_file: Path) -> None:
    """Copies a file into a directory that is safe. Who finds the copy finds it whole.

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
    """Refuses a file or a directory that another user could have written or replaced.

    Returns:
        The path without symbolic links, which is the one that was checked: another user may be able to change a link.

    Raises:
        UnsafePlaceError: If it, or a directory that it is in, belongs to another user or can be written to by others.
        OSError: If it cannot be looked at.
    """
    path = path.resolve(strict=True)
    for place in (path, *path.parents):
        status = os.stat(place)
        if status.st_uid not in (os.geteuid(), 0):
            raise UnsafePathError(f"{place} belongs to another user (id {status.st_uid})")
        is_shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        # In a directory like /tmp others can make files of their own, and not touch those of this user.
        if is_shared and not (place != path and status.st_mode & stat.S_ISVTX):
            raise UnsafePathError(f"{place} can be written to by other users (chmod go-w makes it safe)")
    return path
