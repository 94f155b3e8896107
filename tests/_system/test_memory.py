"""Free memory is the minimum of the host's free memory and the remaining limit of a control group (a real one)."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from lightning_strategies_ext._system.memory import free_memory

LIMIT = 3 * 2**30
PROGRAM = """
import os
from pathlib import Path

Path({group!r}, "cgroup.procs").write_text(str(os.getpid()))
from lightning_strategies_ext._system.memory import free_memory

before = free_memory()
taken = b"x" * 2**30
print(before, free_memory())
"""


def groups() -> Iterator[tuple[Path, str]]:
    """Yields groups that may have limited subgroups, with the name of the limit file: own group and root.

    In version 2, a group with processes cannot have limited subgroups, except for the root.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            yield Path("/sys/fs/cgroup/memory", path.lstrip("/")), "memory.limit_in_bytes"
        elif not controllers:
            yield Path("/sys/fs/cgroup", path.lstrip("/")), "memory.max"
            yield Path("/sys/fs/cgroup"), "memory.max"


@contextmanager
def limited(parent: Path, limit: str) -> Iterator[Path]:
    """Creates a group whose processes may use :data:`LIMIT` bytes in total.

    Raises:
        OSError: If this host does not permit such a group.
    """
    group = parent / f"tests-{os.getpid()}"
    group.mkdir()
    try:
        (group / limit).write_text(str(LIMIT))
        yield group
    finally:
        group.rmdir()


@pytest.fixture
def limited_group() -> Iterator[Path]:
    if not Path("/proc/self/cgroup").exists():
        pytest.skip("this host has no control groups")
    errors: list[str] = []
    with ExitStack() as stack:
        for parent, limit in groups():
            try:
                group = stack.enter_context(limited(parent, limit))
            except OSError as error:
                errors.append(str(error))
                continue
            yield group
            return
    pytest.skip(f"this host permits no control group with a limit: {'; '.join(errors)}")


@pytest.mark.processes
def test_a_limit_counts_and_what_is_taken_of_it(limited_group: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(group=str(limited_group))], capture_output=True, text=True, check=True
    )
    before, after = map(int, result.stdout.split())
    assert LIMIT - 2**30 < before <= LIMIT
    assert before - after >= 2**30


def test_free_memory_is_at_most_the_memory_of_the_host() -> None:
    assert 0 < free_memory() <= psutil.virtual_memory().total
