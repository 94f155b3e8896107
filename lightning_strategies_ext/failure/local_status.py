"""Local status: publishes this rank's status in the status table of its host, and reads the other statuses there.

The status table is shared memory. Writing takes no lock, so a rank that is stopped, or whose GIL is held, does not
block readers. The last status of a rank remains readable after its process has exited. The caller serializes the calls
of one rank.
"""

import ctypes
import mmap
import os
import stat
import struct
import tempfile
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from lightning_strategies_ext._system.peers import KeyValueStore, Peer
from lightning_strategies_ext.failure.exchange_log import ExchangeLog
from lightning_strategies_ext.failure.rank_status import CollectiveProgress, RankStatus
from lightning_strategies_ext.failure.thread_activity import ThreadActivity

#: Seconds between two heartbeats.
HEARTBEAT_INTERVAL_S = 0.25
#: Seconds after which a rank publishes a stack that has not changed.
STACK_AFTER_S = 2.0
#: Modules in which a thread waits for other ranks in a collective.
_COLLECTIVE_MODULES = ("torch.distributed", "torch.nn.parallel.distributed", "horovod", "lightning_strategies_ext")
#: Modules of these that run no collective.
_MODULES_WITHOUT_COLLECTIVES = "lightning_strategies_ext.failure"
#: Stands for the work that a rank waits for after it has finished its stage.
_END_OF_STAGE = object()
#: Size of one rank's row, in bytes.
SLOT_NUM_BYTES = 1 << 15
_MEMORY_NAME = "lightning_strategies_ext_status"
_HEADER = struct.Struct("<II")  # length and checksum of the content
#: Attempts of a reader to read a row that is being written.
_ATTEMPTS = 5
if hasattr(os, "memfd_create"):
    import fcntl

    _PR_GET_DUMPABLE = 3
    #: Seals that fix the size of the memory.
    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class LocalStatus:
    """Statuses of the ranks of this host. Collective among these ranks; the training thread creates it.

    The store is for this object alone.

    Attributes:
        own: Status of this rank. The caller assigns its state, its stage, and what the rank knows.
        peers: Ranks of this host, including this rank.
        activity: Activity of the training thread.
        step_source: Callable that returns stage and step as text.
        exchange_log: Gradient exchanges of this rank in its stage; None if its engine compares them in the exchange.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        peers: Mapping[int, Peer],
        progress: CollectiveProgress,
        step_source: Callable[[], str],
    ) -> None:
        self.own = RankStatus(rank, state="finished")
        self.peers = local_peers(peers, rank)
        self.activity = ThreadActivity(threading.current_thread())
        self.step_source = step_source
        self.exchange_log: ExchangeLog | None = None
        self._progress = progress
        self._pending_work: Any = None
        self._statuses = {rank: self.own}
        key = f"lightning_strategies_ext/status_table/{peers[rank].host}"
        self._status_table = StatusTable.open_for_host(store, key, rank, list(self.peers))

    def sample_training_thread(self, elapsed_s: float) -> None:
        """Samples the training thread, ``elapsed_s`` seconds after the last sample."""
        own, before = self.own, self.own.num_started
        own.num_started = self._progress.num_started()
        self.activity.sample(elapsed_s, has_moved=own.num_started != before)
        pending_work = _END_OF_STAGE if own.state == "finished" else self._progress.pending_work()
        is_same = pending_work is not None and pending_work is self._pending_work
        is_in_collective = is_same or (pending_work is None and self._is_in_collective())
        has_waited = is_in_collective and (own.num_started == before or own.state == "finished")
        own.in_collective_s = own.in_collective_s + elapsed_s if has_waited else 0.0
        self._pending_work = pending_work

    def publish(self) -> None:
        """Publishes this rank's status, with the last sample of the training thread."""
        own, activity = self.own, self.activity
        is_still = activity.unchanged_s >= STACK_AFTER_S
        own.heartbeat += 1
        own.stage_and_step = self.current_step_text()
        own.exchanges = None if self.exchange_log is None else self.exchange_log.summary(own.stage)
        own.unchanged_s, own.idle_s = activity.unchanged_s, activity.idle_s
        own.is_in_debugger = is_still and activity.is_in_debugger
        is_waiting = own.in_collective_s > 0
        own.collective = getattr(self._pending_work, "name", "") or ("a collective" if is_waiting else "")
        own.call_site = activity.call_site() if is_waiting and own.state == "running" else ""
        own.user_frames = tuple(activity.user_frames()) if is_still else ()
        own.stack = activity.stack() if is_still else ""
        if self._status_table is not None:
            self._status_table.write(own.dump(SLOT_NUM_BYTES - 64))

    def start_exchange_log(self) -> ExchangeLog:
        """Starts to publish the gradient exchanges of the stage, which other ranks compare with theirs. Collective."""
        self.exchange_log = log = ExchangeLog()
        return log

    def read(self) -> dict[int, RankStatus]:
        """Returns the newest status of each rank of this host, by rank; without ranks that have published none."""
        if self._status_table is not None:
            for slot, rank in enumerate(self.peers):
                content = None if rank == self.own.rank else self._status_table.read(slot)
                if content is not None:
                    self._statuses[rank] = RankStatus.load(content)
        return self._statuses

    def call_site(self) -> str:
        """Returns the user's innermost call in the training thread; empty if there is none."""
        return self.activity.call_site()

    def current_step_text(self) -> str:
        """Returns stage and step as text; empty if they cannot be determined."""
        try:
            return self.step_source()
        except Exception:  # the training thread may be tearing down the Trainer at the same time
            return ""

    def close(self) -> None:
        """Closes the status table. A second call is a no-op."""
        if self._status_table is not None:
            self._status_table.close()
        self._status_table = None

    def _is_in_collective(self) -> bool:
        module = self.activity.module
        return module.startswith(_COLLECTIVE_MODULES) and not module.startswith(_MODULES_WITHOUT_COLLECTIVES)


def local_peers(peers: Mapping[int, Peer], rank: int) -> dict[int, Peer]:
    """Returns the ranks of the host of a rank, in order."""
    return {other: peer for other, peer in sorted(peers.items()) if peer.host == peers[rank].host}


class StatusTable:
    """One rank's handle of the table, which :meth:`open_for_host` returns."""

    def __init__(self, memory: mmap.mmap, own_slot: int) -> None:
        self._memory = memory
        self._own_slot = own_slot
        self._descriptor: int | None = None
        self._name: str | None = None

    @classmethod
    def open_for_host(cls, store: KeyValueStore, key: str, rank: int, ranks: Sequence[int]) -> "StatusTable | None":
        """Opens the table of this host. Collective among the ranks of the host.

        On Linux the memory is an unnamed memory file, so that no file remains after the ranks exit. On other systems,
        and where /proc is missing or ranks cannot open descriptors there, it is a temporary file that the lowest rank
        removes in :meth:`close`. The key in the store is for the ranks of this host alone.

        Returns:
            The table; None if this rank cannot open the memory of the lowest rank, or the memory belongs to another
            user.
        """
        num_bytes = SLOT_NUM_BYTES * len(ranks)
        if rank == min(ranks):
            descriptor, path, name = _create_memory(num_bytes)
            store.set(key, path)
            table = cls(mmap.mmap(descriptor, num_bytes), ranks.index(rank))
            table._descriptor, table._name = descriptor, name  # open until `close`: another rank may open it later
            return table
        path = store.get(key).decode()
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | getattr(os, "O_NONBLOCK", 0))
            try:
                if _is_status_table(descriptor, path, num_bytes):
                    return cls(mmap.mmap(descriptor, num_bytes), ranks.index(rank))
            finally:
                os.close(descriptor)
        return None

    def close(self) -> None:
        """Unmaps the memory."""
        self._memory.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
        if self._name is not None:
            with suppress(OSError):
                os.unlink(self._name)

    def write(self, content: bytes) -> None:
        """Replaces the content of this rank's row.

        Raises:
            ValueError: If the content is larger than a row.
        """
        if len(content) > SLOT_NUM_BYTES - _HEADER.size:
            raise ValueError(f"{len(content)} bytes do not fit into a slot of {SLOT_NUM_BYTES}")
        at = self._own_slot * SLOT_NUM_BYTES
        self._memory[at : at + _HEADER.size + len(content)] = _HEADER.pack(len(content), zlib.crc32(content)) + content

    def read(self, slot: int) -> bytes | None:
        """Returns the content of a row; None if the row is empty, or its rank is writing it."""
        at = slot * SLOT_NUM_BYTES
        for _ in range(_ATTEMPTS):
            num_bytes, checksum = _HEADER.unpack_from(self._memory, at)
            begin = at + _HEADER.size
            content = self._memory[begin : begin + min(num_bytes, SLOT_NUM_BYTES)]
            if content and zlib.crc32(content) == checksum:
                return content
        return None


def _create_memory(num_bytes: int) -> tuple[int, str, str | None]:
    """Creates memory. Returns its descriptor, the path by which ranks open it, and the path to remove, or None."""
    if hasattr(os, "memfd_create"):
        with suppress(OSError):  # a container may forbid it
            descriptor = os.memfd_create(_MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            if os.access(path, os.R_OK | os.W_OK) and _is_dumpable():
                os.ftruncate(descriptor, num_bytes)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
                return descriptor, path, None
            os.close(descriptor)
    descriptor, path = tempfile.mkstemp(prefix=f"{_MEMORY_NAME}_")
    os.ftruncate(descriptor, num_bytes)
    return descriptor, path, path


def _is_dumpable() -> bool:
    """Returns whether other processes of this user can open the descriptors of this process in /proc."""
    return bool(ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 1)


def _is_status_table(descriptor: int, path: str, num_bytes: int) -> bool:
    """Returns whether a file is a status table of this user. A manipulated store could name another file."""
    status = os.fstat(descriptor)
    is_own = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    if not is_own or not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes:
        return False
    if os.path.basename(path).startswith(_MEMORY_NAME):
        return True
    # A process that truncated unsealed memory would end this process by a SIGBUS.
    is_memory = os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{_MEMORY_NAME}")
    return is_memory and fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) == _SEALS
