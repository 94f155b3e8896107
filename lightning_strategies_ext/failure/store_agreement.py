"""Stop agreement over a store, for a world whose ranks may change.

A daemon thread of each rank polls the store that the ranks of the world share, a few times per second.
"""

import logging
import threading
import time
from contextlib import suppress

from torch.distributed import PrefixStore, Store

from lightning_strategies_ext.failure.ballots import StepIndex, StopDecision
from lightning_strategies_ext.failure.process_exit import abandon_thread
from lightning_strategies_ext.failure.stop_agreement import StopAgreement

log = logging.getLogger(__name__)

#: Seconds between two polls of a rank. A poll is one small request to the store, outside of the training thread; in
#: larger worlds ranks poll less often, so that the store serves at most about 1,000 requests per second.
POLL_INTERVAL_S = 0.2
POLLS_PER_SECOND_OF_STORE = 1000

#: Seconds that rank 0 waits at the end for the other ranks to read the decision.
READ_TIMEOUT_S = 5.0
_READ_POLL_INTERVAL_S = 0.02

_REQUESTED = "requested"


class StoreAgreement:
    """Exchanges the votes of one rank. Collective: all ranks of a world create it together.

    Args:
        agreement: Stop agreement of this rank.
        store: Store that the ranks of this world share, and no other ranks.
        rank: Global rank of this process.
        world_size: Number of ranks.
    """

    def __init__(self, agreement: StopAgreement, store: Store, rank: int, world_size: int) -> None:
        self._agreement = agreement
        self._store = PrefixStore("lightning_strategies_ext/termination", store)
        self._rank = rank
        self._world_size = world_size
        self._interval_s = max(POLL_INTERVAL_S, world_size / POLLS_PER_SECOND_OF_STORE)
        self._has_requested = self._has_published = self._has_read = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning-strategies-ext store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread. A second call is a no-op.

        After a request, rank 0, whose process usually serves the store, first waits until the other ranks have read the
        decision.
        """
        is_first_call = not self._closed.is_set()
        self._closed.set()
        self._thread.join()
        if is_first_call and self._rank == 0 and self._has_read:
            self._wait_for_readers()

    def abandon(self) -> None:
        """Abandons the thread, which may wait for an unavailable store."""
        self._closed.set()
        abandon_thread(self._thread)

    def _run(self) -> None:
        try:
            while not self._agreement.is_decided and not self._closed.wait(self._interval_s):
                self._poll()
        except Exception as error:  # the store has exited with rank 0
            log.debug("rank %d stops polling for a stop: %s", self._rank, error)
            self._agreement.decide_alone()

    def _poll(self) -> None:
        vote = self._agreement.vote()
        if vote.is_requested and not self._has_requested:
            self._has_requested = True
            self._store.set(_REQUESTED, "")
        is_requested = vote.is_requested or self._store.check([_REQUESTED])
        self._agreement.receive(StopDecision(vote.agreement_id) if is_requested else None)
        vote = self._agreement.vote()
        if vote.last_started_step is None:
            return
        if not self._has_published:
            self._has_published = True
            self._store.set(_step_key(self._rank), f"{vote.last_started_step[0]},{vote.last_started_step[1]}")
        keys = [_step_key(rank) for rank in range(self._world_size)]
        # Polled, not waited for: a wait would block the store's connection, which the training thread shares.
        if self._store.check(keys):
            last_step = max(_decode(self._store.get(key)) for key in keys)
            self._store.set(f"read/{self._rank}", "")
            self._has_read = True
            self._agreement.receive(StopDecision(vote.agreement_id, last_step))

    def _wait_for_readers(self) -> None:
        deadline = time.monotonic() + READ_TIMEOUT_S
        keys = [f"read/{rank}" for rank in range(self._world_size)]
        with suppress(RuntimeError):  # the store is on another host and unavailable
            while not self._store.check(keys) and time.monotonic() < deadline:
                time.sleep(_READ_POLL_INTERVAL_S)


def _step_key(rank: int) -> str:
    return f"step/{rank}"


def _decode(value: bytes) -> StepIndex:
    train, evaluation = value.decode().split(",")
    return int(train), int(evaluation)
