"""Free memory for this process, within the limits of its control groups, such as those of a container or batch system.

The kernel kills a process that exceeds the limit, silently. Check the limit before a large allocation.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_UNLIMITED = 1 << 62
_CGROUPS = Path("/sys/fs/cgroup")
#: Files with the limit, the usage, and the reclaimable part of the usage, in versions 2 and 1 of control groups.
_FILES_2 = "memory.max", "memory.current", "inactive_file"
_FILES_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def free_memory() -> int:
    """Returns the bytes that this process can allocate: those of the host, or fewer with a control group's limit."""
    return min(_available(), *_free_in_cgroups())


def _available() -> int:
    try:
        return int(psutil.virtual_memory().available)
    except OSError:  # /proc is missing: glibc calls the kernel; early versions fail
        pages = os.sysconf("SC_AVPHYS_PAGES")
        return pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else _UNLIMITED


def _free_in_cgroups() -> Iterator[int]:
    with suppress(OSError):  # not Linux
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                for root in (_CGROUPS, _CGROUPS / "unified"):
                    yield from _free_in_group(root, path, *_FILES_2)
            elif "memory" in controllers.split(","):
                yield from _free_in_group(_CGROUPS / controllers, path, *_FILES_1)
    yield _UNLIMITED


def _free_in_group(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """Yields the free bytes of a group and of its parent groups."""
    group = root / path.lstrip("/")
    if not group.exists():  # a container sees its own group as the root, whatever its name on the host
        group = root
    while group.is_relative_to(root):
        with suppress(OSError, ValueError):  # the root has no limit file, and "max" is no number
            allowed, used = (int((group / name).read_text()) for name in (limit, usage))
            numbers = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            yield max(0, allowed - used + int(numbers.get(reclaimable, 0)))
        group = group.parent
