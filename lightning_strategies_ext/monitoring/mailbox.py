"""Windows on their way to rank 0, by the ranks' key-value store, in a thread: the training waits for nobody.

There is no collective in it. A rank writes, rank 0 looks whether something is there; whoever is late, or gone, keeps
nobody from going on. What the store does not answer, or answers with an error, is the end of the mailbox and of nothing
else.
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

#: How long a rank looks for rank 0's token, in seconds.
_TOKEN_S = 30.0
#: Between two looks of rank 0 at the end, and of a rank that looks for rank 0's token, in seconds.
_LOOK_S = 0.01
#: Windows that rank 0 keeps while some rank's is missing.
_MAX_WAITING = 4


class Mailbox:
    """One rank's part of it.

    Args:
        store: Shared by the ranks, a part of it for this alone.
        rank: Of this process.
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
        """Sends a window; returns at once."""
        self._posts.put(window)

    def complete(self) -> Iterator[list[Window]]:
        """On rank 0, the windows that have come from all ranks since the last call, in the order of ranks."""
        while self._complete:
            yield self._complete.popleft()

    def finish(self, timeout_s: float) -> None:
        """Ends it when all is sent, and on rank 0 when all has come, or after some seconds."""
        self._deadline = time.monotonic() + timeout_s
        self._posts.put(None)
        self._thread.join(timeout_s)

    def abandon(self) -> None:
        """Ends it and waits for nothing."""
        self._is_abandoned = True
        self._posts.put(None)

    # --- in the thread ---

    def _run(self) -> None:
        try:
            store = self._connect()
            while (window := self._posts.get()) is not None and store is not None:
                self._send(store, window)
            while store is not None and self._pending and not self._is_over:
                self._look(store)
                time.sleep(_LOOK_S)
        except Exception as error:  # the store is gone, with rank 0 perhaps
            log.debug("The monitor of rank %d has lost the other ranks: %s", self._rank, error)

    @property
    def _is_over(self) -> bool:
        return self._is_abandoned or time.monotonic() > self._deadline

    def _connect(self) -> dist.Store | None:
        """The store by a connection of its own, where nobody waits for whoever waits at the other; None if it is over.

        A token tells what is written there from what others have written, who know no prefix of the shared one.
        """
        if self._rank == 0:
            token = uuid.uuid4().hex
            self._shared.set("token", token)
        else:
            give_up_at = time.monotonic() + _TOKEN_S
            while not self._shared.check(["token"]):
                if self._is_over or time.monotonic() > give_up_at:
                    return None
                time.sleep(5 * _LOOK_S)
            token = self._shared.get("token").decode()
        return dist.PrefixStore(f"lightning_strategies_ext/monitor/{token}", clone_store(self._shared))

    def _send(self, store: dist.Store, window: Window) -> None:
        if self._is_abandoned:
            return
        if self._rank != 0:
            store.set(_key(window.number, window.rank), window.dump())  # type: ignore[arg-type]  # it takes bytes
            return
        self._pending[window.number] = {0: window}
        self._look(store)
        while len(self._pending) > _MAX_WAITING:
            del self._pending[min(self._pending)]

    def _look(self, store: dist.Store) -> None:
        for number in sorted(self._pending):
            here = self._pending[number]
            for rank in range(self._world_size):
                key = _key(number, rank)
                if rank not in here and store.check([key]):
                    here[rank] = Window.load(store.get(key))
                    with suppress(RuntimeError):  # not every store deletes
                        store.delete_key(key)
            if len(here) == self._world_size:
                self._complete.append([here[rank] for rank in range(self._world_size)])
                del self._pending[number]


def _key(number: int, rank: int) -> str:
    return f"{number}/{rank}"
