"""How much memory there is for this process, where a container or a batch system allows it less than the host has.

The kernel ends a process that takes more, without a word; so whoever is about to take much asks first.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_UNLIMITED = 1 << 62
_CGROUPS = Path("/sys/fs/cgroup")
#: Limit, use, and what of that use the kernel would give back, in versions 2 and 1 of control groups.
_FILES_2 = "memory.max", "memory.current", "inactive_file"
_FILES_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def free_memory() -> int:
    """Bytes that this process could still get: what the host has available, or less if a control group allows less."""
    return min(_available(), *_free_in_cgroups())


def _available() -> int:
    try:
        return int(psutil.virtual_memory().available)
    except OSError:  # /proc is missing: glibc asks the kernel, in early versions it fails
        pages = os.sysconf("SC_AVPHYS_PAGES")
        return pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else _UNLIMITED


def _free_in_cgroups() -> Iterator[int]:
    with suppress(OSError):  # no Linux
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                for root in (_CGROUPS, _CGROUPS / "unified"):
                    yield from _left_in_group(root, path, *_FILES_2)
            elif "memory" in controllers.split(","):
                yield from _left_in_group(_CGROUPS / controllers, path, *_FILES_1)
    yield _UNLIMITED


def _left_in_group(root: Path, path: str, limit: str, use: str, given_back: str) -> Iterator[int]:
    """What is left of a group's limit, and of those of the groups that it is in."""
    group = root / path.lstrip("/")
    if not group.exists():  # a container sees its own group as the root, by whatever name the host knows it
        group = root
    while group.is_relative_to(root):
        with suppress(OSError, ValueError):  # the root has no limit; "max" is none
            allowed, used = (int((group / name).read_text()) for name in (limit, use))
            numbers = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            yield max(0, allowed - used + int(numbers.get(given_back, 0)))
        group = group.parent
