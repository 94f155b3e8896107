"""Agreement on a SIGTERM by way of a store, where the ranks may change and there is no watch that speaks with them.

A daemon thread per rank looks a few times per second into the store that the ranks of one world share.
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

#: How often a rank looks for a request, in seconds. Each look is one small request to the store, off the training
#: thread; larger worlds look less often so that the store serves about 1,000 a second at most.
POLL_INTERVAL_S = 0.2
POLLS_PER_SECOND_OF_STORE = 1000

#: How long rank 0 waits, once the run has to end, for the others to read which step is the last, in seconds.
READ_TIMEOUT_S = 5.0
_READ_POLL_INTERVAL_S = 0.02

_REQUESTED = "requested"


class StoreAgreement:
    """One rank's part. All ranks of a world create theirs together.

    Args:
        agreement: What this rank says and hears.
        store: Shared by the ranks of this world, and by no others.
        rank: Of this process.
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
        """Ends this rank's part. A second call does no harm.

        Without a request nobody is talked to. After one, rank 0, whose process usually holds the store, first waits
        until the others have read the decision.
        """
        is_first_call = not self._closed.is_set()
        self._closed.set()
        self._thread.join()
        if is_first_call and self._rank == 0 and self._has_read:
            self._wait_for_readers()

    def abandon(self) -> None:
        """Leaves the thread to itself, which may wait for a store that is gone."""
        self._closed.set()
        abandon_thread(self._thread)

    def _run(self) -> None:
        try:
            while not self._agreement.is_decided and not self._closed.wait(self._interval_s):
                self._poll()
        except Exception as error:  # the store went away with rank 0
            log.debug("rank %d no longer asks whether to stop: %s", self._rank, error)
            self._agreement.decide_alone()

    def _poll(self) -> None:
        ballot = self._agreement.vote()
        if ballot.is_requested and not self._has_requested:
            self._has_requested = True
            self._store.set(_REQUESTED, "")
        is_requested = ballot.is_requested or self._store.check([_REQUESTED])
        self._agreement.receive(StopDecision(ballot.agreement_id) if is_requested else None)
        ballot = self._agreement.vote()
        if ballot.last_started_step is None:
            return
        if not self._has_published:
            self._has_published = True
            self._store.set(_step_key(self._rank), f"{ballot.last_started_step[0]},{ballot.last_started_step[1]}")
        keys = [_step_key(rank) for rank in range(self._world_size)]
        # Asked again, not waited for: that would hold the store's connection, which the training thread shares.
        if self._store.check(keys):
            last_step = max(_decode(self._store.get(key)) for key in keys)
            self._store.set(f"read/{self._rank}", "")
            self._has_read = True
            self._agreement.receive(StopDecision(ballot.agreement_id, last_step))

    def _wait_for_readers(self) -> None:
        deadline = time.monotonic() + READ_TIMEOUT_S
        keys = [f"read/{rank}" for rank in range(self._world_size)]
        with suppress(RuntimeError):  # the store is elsewhere, and gone
            while not self._store.check(keys) and time.monotonic() < deadline:
                time.sleep(_READ_POLL_INTERVAL_S)


def _step_key(rank: int) -> str:
    return f"step/{rank}"


def _decode(value: bytes) -> StepIndex:
    train, evaluation = value.decode().split(",")
    return int(train), int(evaluation)
