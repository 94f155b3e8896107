"""A ``/dev/shm`` that only the processes of one test use.

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

HOLD = 'mount -t tmpfs -o size={size} tmpfs /dev/shm && echo ready && exec cat > "/dev/null"'


@dataclass
class PrivateSharedMemory:
    """A ``/dev/shm`` in a mount namespace.

    Attributes:
        prefix: Beginning of a command that uses it.
        directory: Its path in this process.
    """

    prefix: list[str]
    directory: Path

    def free_num_bytes(self) -> int:
        space = os.statvfs(self.directory)
        return space.f_bfree * space.f_frsize

    def wait_until_empty(self, timeout_s: float = 5) -> None:
        """Waits until it contains no files, named or unnamed; fails after the timeout."""
        deadline = time.monotonic() + timeout_s
        space = os.statvfs(self.directory)
        while (names := os.listdir(self.directory)) or self.free_num_bytes() < space.f_blocks * space.f_frsize:
            assert time.monotonic() < deadline, names or "memory is still in use"
            time.sleep(0.1)


@contextmanager
def private_shared_memory(size: str = "1g") -> Iterator[PrivateSharedMemory]:
    """Mounts a ``/dev/shm`` until the block ends. Skips the test if this machine does not permit it."""
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        pytest.skip("a private /dev/shm requires unshare and nsenter")
    holder = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", HOLD.format(size=size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    try:
        if holder.stdout.readline() != "ready\n":
            pytest.skip("a private /dev/shm requires root")
        prefix = ["nsenter", f"--mount=/proc/{holder.pid}/ns/mnt", f"--wd={os.getcwd()}"]
        yield PrivateSharedMemory(prefix, Path(f"/proc/{holder.pid}/root/dev/shm"))
    finally:
        holder.communicate("")
