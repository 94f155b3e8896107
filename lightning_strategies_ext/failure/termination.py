"""Agreement on a SIGTERM: whichever rank receives it, all ranks stop before the same step, and no step waits for it.

Lightning asks rank 0 by a blocking broadcast before every training step, which costs a round trip per step (and a host
synchronisation on a GPU, Lightning issue 21487) and does not see a signal on another rank (issue 20806). Here the
training thread only notes which step it starts. A daemon thread per rank looks a few times per second into the process
group's key-value store. Once any rank has asked to stop:

1. each rank's thread publishes the last step that its rank has started, and from then on its training thread asks
   before it starts another;
2. when all have published, the highest of these steps is the last: ranks that are behind catch up to it, so that no
   rank is left alone in a collective, and all stop before the next.

What it does not promise: that a rank whose peer has died stops at a common step. It stops on its own after
:data:`DECISION_TIMEOUT_S`.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count

from torch.distributed import PrefixStore, Store

from lightning_strategies_ext.failure.store_thread import StoreThread

log = logging.getLogger(__name__)

#: A point in a run, ordered as the run proceeds: (training steps started, evaluation steps started since).
Step = tuple[int, int]

#: How often a rank looks for a request, in seconds. Each look is one small request to the store of rank 0, off the
#: training thread; larger worlds look less often so that rank 0 serves about 1,000 a second at most.
POLL_INTERVAL_S = 0.2
POLLS_PER_SECOND_OF_STORE = 1000

#: How long a rank that knows of a request waits for the last step of the others, in seconds.
DECISION_TIMEOUT_S = 30.0

#: How long rank 0 waits, once the run has to end, for the others to read which step is the last, in seconds.
READ_TIMEOUT_S = 5.0
_READ_POLL_INTERVAL_S = 0.02

_REQUESTED = "requested"
_run_numbers: Iterator[int] = count()


class TerminationAgreement:
    """One rank's part in the agreement, for one stage of the Trainer. All ranks of a group create theirs together.

    Args:
        store: The store that all ranks share; None for a single rank, which needs no agreement.
        thread: Asks the store; None without one.
        rank: Global rank of this process.
        world_size: Number of ranks.
        is_requested: Whether the ranks know already that they have to stop, before the first step; the same on all.
        name: Tells it from other agreements in the same store; the same on all ranks. None numbers those of a process.
    """

    def __init__(
        self,
        store: Store | None,
        thread: StoreThread | None,
        rank: int = 0,
        world_size: int = 1,
        is_requested: bool = False,
        name: str | None = None,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self.interval_s = max(POLL_INTERVAL_S, world_size / POLLS_PER_SECOND_OF_STORE)
        self._requested = self._agreeing = is_requested
        self._has_stopped = False
        self._step: Step = (0, 0)
        self._last_step: Step | None = None
        self._lock = threading.Lock()
        self._decided = threading.Event()
        self._is_closed = self._is_abandoned = False
        self._store: Store | None = None
        self._thread: StoreThread | None = None
        if is_requested:
            self._decided.set()
        if store is not None:
            # Every stage has keys of its own: an agreement that one stage has reached must not end the next.
            name = str(next(_run_numbers)) if name is None else name
            self._store = PrefixStore(f"lightning_strategies_ext/termination/{name}", store)
            if thread is not None and not is_requested:
                self._thread = thread
                thread.ask(self)

    @property
    def is_unanswered(self) -> bool:
        """Whether this rank knows of a request and has not been told to stop: it came after the stage's last step."""
        return self._requested and not self._has_stopped

    def request(self) -> None:
        """Asks all ranks to stop. Safe in a signal handler: takes no lock and talks to nobody."""
        self._requested = True

    def must_stop_before_train_step(self) -> bool:
        """Notes that this rank is about to start a training step; True if it has to stop instead."""
        return self._must_stop_before((self._step[0] + 1, 0))

    def must_stop_before_evaluation_step(self) -> bool:
        """Notes that this rank is about to start a validation, test or predict step; True if it has to stop."""
        return self._must_stop_before((self._step[0], self._step[1] + 1))

    def close(self) -> None:
        """Ends this rank's part. Harmless when called again.

        Without a request nobody is talked to. After one, rank 0, whose process usually holds the store, first waits
        until the others have read the decision.
        """
        is_first_call, self._is_closed = not self._is_closed, True
        if self._store is None or self._thread is None:
            return
        self._thread.drop(self)
        self._decided.set()
        if is_first_call and self._rank == 0 and self._last_step is not None:
            self._wait_for_readers(self._store)

    def abandon(self) -> None:
        """Ends this rank's part without a word to the others, some of whom may be gone, and the store with them.

        Nothing is agreed on from then on: this rank goes on, to where it learns why.
        """
        self._is_closed = self._is_abandoned = True
        self._decided.set()

    def look(self) -> bool:
        """Asks the store once whether to stop, and, if so, before which step. Whether to ask again."""
        assert self._store is not None
        try:
            if not self._agreeing and (self._requested or self._store.check([_REQUESTED])):
                self._begin_to_agree(self._store)
            if self._agreeing and not self._is_closed:
                self._agree(self._store)
        except Exception as error:  # the store went away with rank 0
            log.debug("rank %d no longer asks whether to stop: %s", self._rank, error)
            self._agreeing |= self._requested
            self._decided.set()
            return False
        return not self._decided.is_set()

    def _must_stop_before(self, step: Step) -> bool:
        self._has_stopped = self._is_after_last(step)
        return self._has_stopped

    def _is_after_last(self, step: Step) -> bool:
        if self._store is None:
            self._step = step
            return self._requested
        with self._lock:
            if not self._agreeing:
                self._step = step
                return False
        if not self._decided.wait(DECISION_TIMEOUT_S):
            log.warning("Rank %d stops alone: the other ranks did not answer in %s s.", self._rank, DECISION_TIMEOUT_S)
            return True
        if self._last_step is None and self._is_abandoned:
            self._step = step
            return False
        if self._last_step is None or step > self._last_step:
            return True
        self._step = step
        return False

    def _begin_to_agree(self, store: Store) -> None:
        self._requested = True
        store.set(_REQUESTED, str(self._rank))
        with self._lock:
            self._agreeing = True
        store.set(_step_key(self._rank), f"{self._step[0]},{self._step[1]}")

    def _agree(self, store: Store) -> None:
        keys = [_step_key(rank) for rank in range(self._world_size)]
        # Asked again, not waited for: that would hold the store's connection, which the training thread shares.
        if store.check(keys):
            self._last_step = max(_decode(store.get(key)) for key in keys)
            store.set(f"read/{self._rank}", "")
            self._decided.set()

    def _wait_for_readers(self, store: Store) -> None:
        deadline = time.monotonic() + READ_TIMEOUT_S
        with suppress(RuntimeError):  # the store is elsewhere, and gone
            while not store.check([f"read/{rank}" for rank in range(self._world_size)]) and time.monotonic() < deadline:
                time.sleep(_READ_POLL_INTERVAL_S)


def _step_key(rank: int) -> str:
    return f"step/{rank}"


def _decode(value: bytes) -> Step:
    train, evaluation = value.decode().split(",")
    return int(train), int(evaluation)
