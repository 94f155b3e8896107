"""Transfer of windows to rank 0 over the ranks' key-value store, in a background thread: the training never waits.

It uses no collectives: ranks write, and rank 0 polls. A late or exited rank therefore blocks no other rank. An error or
timeout of the store ends the transfer, but not the training.
"""

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue

import torch.distributed as dist

from lightning_strategies_ext._system.connections import clone_store
from lightning_strategies_ext.monitoring.records import Window

log = logging.getLogger(__name__)

#: Time for which a rank polls for rank 0's token, in seconds.
_TOKEN_S = 30.0
#: Polling interval of rank 0 at the end; a fifth of that of ranks that poll for the token. In seconds.
_POLL_S = 0.01
#: Maximum number of incomplete windows that rank 0 stores.
_MAX_INCOMPLETE = 4


class Mailbox:
    """Sends one rank's windows; on rank 0, receives those of all ranks.

    Args:
        store: Store of the ranks, with a prefix for this purpose.
        rank: Rank of this process.
        world_size: Number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._shared = store
        self._rank = rank
        self._world_size = world_size
        self._posts: SimpleQueue[Window | None] = SimpleQueue()
        self._complete: deque[list[Window]] = deque()
        self._pending: dict[int, dict[int, Window]] = {}
        self._deadline = float("inf")
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def post(self, window: Window) -> None:
        """Sends a window; returns immediately."""
        self._posts.put(window)

    def complete(self) -> Iterator[list[Window]]:
        """Yields, on rank 0, the windows that all ranks have sent since the last call, each as a list by rank."""
        while self._complete:
            yield self._complete.popleft()

    def finish(self, timeout_s: float) -> None:
        """Waits until all windows are sent and, on rank 0, received, up to the timeout; then ends the thread."""
        self._deadline = time.monotonic() + timeout_s
        self._posts.put(None)
        self._thread.join(timeout_s)

    def abandon(self) -> None:
        """Ends the thread without waiting for it."""
        self._is_abandoned = True
        self._posts.put(None)

    # --- in the background thread ---

    def _run(self) -> None:
        try:
            store = self._connect()
            while (window := self._posts.get()) is not None and store is not None:
                self._send(store, window)
            while store is not None and self._pending and not self._is_over:
                self._poll(store)
                time.sleep(_POLL_S)
        except Exception as error:  # the store is closed, for example because rank 0 has exited
            log.debug("The monitor of rank %d has lost the other ranks: %s", self._rank, error)

    @property
    def _is_over(self) -> bool:
        return self._is_abandoned or time.monotonic() > self._deadline

    def _connect(self) -> dist.Store | None:
        """Connects to the store, so that requests do not queue behind those of other threads; None after a timeout.

        The new connection lacks the prefix of the shared store; a token from rank 0 separates its keys from others.
        """
        if self._rank == 0:
            token = uuid.uuid4().hex
            self._shared.set("token", token)
        else:
            deadline = time.monotonic() + _TOKEN_S
            while not self._shared.check(["token"]):
                if self._is_over or time.monotonic() > deadline:
                    return None
                time.sleep(5 * _POLL_S)
            token = self._shared.get("token").decode()
        return dist.PrefixStore(f"lightning_strategies_ext/monitor/{token}", clone_store(self._shared))

    def _send(self, store: dist.Store, window: Window) -> None:
        if self._is_abandoned:
            return
        if self._rank != 0:
            store.set(_key(window.number, window.rank), window.dump())  # type: ignore[arg-type]  # bytes are accepted
            return
        self._pending[window.number] = {0: window}
        self._poll(store)
        while len(self._pending) > _MAX_INCOMPLETE:
            del self._pending[min(self._pending)]

    def _poll(self, store: dist.Store) -> None:
        for number in sorted(self._pending):
            windows = self._pending[number]
            for rank in range(self._world_size):
                key = _key(number, rank)
                if rank not in windows and store.check([key]):
                    windows[rank] = Window.load(store.get(key))
                    with suppress(RuntimeError):  # not every store supports it
                        store.delete_key(key)
            if len(windows) == self._world_size:
                self._complete.append([windows[rank] for rank in range(self._world_size)])
                del self._pending[number]


def _key(number: int, rank: int) -> str:
    return f"{number}/{rank}"
