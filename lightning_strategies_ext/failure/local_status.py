"""Local status: publishes this rank's status in the status table of its host, and reads the other statuses there.

Neither blocks nor locks. The caller serializes the calls.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.failure.exchange_log import ExchangeLog
from lightning_strategies_ext.failure.rank_status import CollectiveProgress, RankStatus
from lightning_strategies_ext.failure.status_table import SLOT_NUM_BYTES, StatusTable
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
