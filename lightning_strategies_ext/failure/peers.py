"""Where ranks run: hosts and processes, as other ranks know them."""

import os
import socket
from dataclasses import dataclass

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
        return cls(rank, pid_namespace_identity(), os.getpid(), psutil.Process().create_time())

    def is_running(self) -> bool:
        """Whether the process is alive; only meaningful on its own host."""
        try:
            process = psutil.Process(self.pid)
            return bool(process.create_time() == self.start_time and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False


def pid_namespace_identity() -> str:
    """Tells hosts apart, and containers on one host, whose pids mean nothing to each other."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return f"{socket.gethostname()}/{namespace}"
