"""A ``/dev/shm`` for one test, so that other processes of the machine leave nothing in it.

with private_shared_memory() as shared_memory:
    subprocess.run([*shared_memory.prefix, sys.executable, "train.py"])
    shared_memory.wait_until_empty()
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

KEEP = 'mount -t tmpfs -o size={size} tmpfs /dev/shm && echo ready && exec cat > "/dev/null"'


@dataclass
class PrivateSharedMemory:
    """One such.

    Attributes:
        prefix: Goes before a command that shall use it.
        directory: Where it is, as this process sees it.
    """

    prefix: list[str]
    directory: Path

    def free_num_bytes(self) -> int:
        space = os.statvfs(self.directory)
        return space.f_bfree * space.f_frsize

    def wait_until_empty(self, timeout_s: float = 5) -> None:
        """Fails if something stays there, or stays taken without a name; processes may still be cleaning up."""
        deadline = time.monotonic() + timeout_s
        space = os.statvfs(self.directory)
        while (names := os.listdir(self.directory)) or self.free_num_bytes() < space.f_blocks * space.f_frsize:
            assert time.monotonic() < deadline, names or "memory is taken"
            time.sleep(0.1)


@contextmanager
def private_shared_memory(size: str = "1g") -> Iterator[PrivateSharedMemory]:
    """Mounts one in a namespace, which goes with all that is in it; skips the test where that cannot be done."""
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        pytest.skip("a /dev/shm of the test's own needs unshare and nsenter")
    keeper = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", KEEP.format(size=size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert keeper.stdout is not None
    try:
        if keeper.stdout.readline() != "ready\n":
            pytest.skip("a /dev/shm of the test's own needs root")
        prefix = ["nsenter", f"--mount=/proc/{keeper.pid}/ns/mnt", f"--wd={os.getcwd()}"]
        yield PrivateSharedMemory(prefix, Path(f"/proc/{keeper.pid}/root/dev/shm"))
    finally:
        keeper.communicate("")
