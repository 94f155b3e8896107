"""Where ranks run: hosts and processes, as other ranks know them."""

import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import psutil


class KeyValueStore(Protocol):
    """What ranks need of a store of torch's to find each other."""

    def set(self, key: str, value: str) -> None:
        """Sets a value."""

    def get(self, key: str) -> bytes:
        """Waits for a value."""


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


def meet_peers(store: KeyValueStore, rank: int, world_size: int) -> dict[int, Peer]:
    """Where each rank runs, by rank; called by all of them together.

    Args:
        store: Shared by the ranks, and used for nothing else.
        rank: Of this process.
        world_size: Number of ranks.
    """
    store.set(str(rank), json.dumps(asdict(Peer.this_process(rank))))
    return {other: Peer(**json.loads(store.get(str(other)))) for other in range(world_size)}


def host_identity() -> str:
    """Tells hosts apart, and containers on one host, which cannot reach each other's processes or sockets."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    for namespace in ("pid", "net"):
        with suppress(OSError):
            parts.append(str(Path("/proc/self/ns", namespace).readlink()))
    return "/".join(parts)
