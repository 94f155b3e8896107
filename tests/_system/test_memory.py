"""What is free is what the host has, or what a control group still allows: a real one, made by the test."""

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
    """Groups that may have limited ones in them, and the name of the file with a limit: this process's, and the first.

    In version 2 a group that has processes can limit no others, but for the latter.
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
    """A group in which processes may have :data:`LIMIT` bytes together.

    Raises:
        OSError: If none can be made here.
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
        pytest.skip("there are no control groups here")
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
    pytest.skip(f"no control group with a limit can be made here: {'; '.join(errors)}")


@pytest.mark.processes
def test_a_limit_counts_and_what_is_taken_of_it(limited_group: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(group=str(limited_group))], capture_output=True, text=True, check=True
    )
    before, after = map(int, result.stdout.split())
    assert LIMIT - 2**30 < before <= LIMIT
    assert before - after >= 2**30


def test_it_is_no_more_than_the_host_has() -> None:
    assert 0 < free_memory() <= psutil.virtual_memory().total
