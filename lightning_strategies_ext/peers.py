"""Where ranks run: hosts and processes, as other ranks know them."""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Peer:
    """Where a rank runs. The start time tells a process from a later one with the same pid."""

    rank: int
    host: str
    pid: int
    start_time: float

    @classmethod
    def this_process(cls, rank: int) -> "Peer":
        """Describes the calling process."""
        return cls(rank, host_identity(), os.getpid(), psutil.Process().create_time())

    def is_running(self) -> bool:
        """Whether the process is alive; only meaningful on its own host."""
        try:
            process = psutil.Process(self.pid)
            return bool(process.create_time() == self.start_time and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False


def host_identity() -> str:
    """Tells hosts apart, and containers on one host, which cannot reach each other's processes or sockets."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    for namespace in ("pid", "net"):
        with suppress(OSError):
            parts.append(str(Path("/proc/self/ns", namespace).readlink()))
    return "/".join(parts)
