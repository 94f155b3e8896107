"""Between hosts: one rank of each tells the others what its host's board says, and it shows when a host is gone.

Signs travel by way of the store, in a thread that may wait for it, on a connection of its own; the watch, which waits
for nobody, only looks at what the thread has brought. Of ``n`` hosts, each asks the store for two things per interval,
and that of rank 0 for ``n`` more: at most :data:`REQUESTS_PER_S` together, however many ranks there are.

What cannot wait for the store goes by lines, see :mod:`.lines`, which the watch's own thread looks after: what has
failed first, that rank 0, who alone hears all, is there, that a process is gone which tells for its host, that a host
is out of reach. Where the kernel does not notice that, a host which has told nothing for :data:`LOST_S` is lost.
"""

import json
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist

from lightning_strategies_ext.connections import own_connection
from lightning_strategies_ext.failure.lines import Address, Lines
from lightning_strategies_ext.failure.signs import Failure, Sign
from lightning_strategies_ext.failure.waiting import Waiting

#: How often a host tells what it knows, in seconds, if there are not so many that it takes longer.
INTERVAL_S = 1.0
REQUESTS_PER_S = 1000
#: The same once something has failed, and how long the first rank waits at its end for the others to know: they read it
#: in a store that goes with it, as a rule.
SOON_S = 0.25
READ_S = 3.0
_POLL_S = 0.05
#: Of a host with which there is no line: one that has told nothing for so long is gone, in seconds.
LOST_S = 8.0
#: How much is said at once on a line, in bytes; of a failure, and of nothing in particular.
_FAILURE_NUM_BYTES = 1 << 15
_SIGN_NUM_BYTES = 1 << 12
_FAILURE = "failure"


class Hosts:
    """What one rank knows of the other hosts.

    Args:
        store: The store that all ranks share.
        ranks: Those of each host, in the order of their first; the same on all ranks.
        rank: Global rank of this process.
        number: Tells these from others with the same store.
        waiting: Of the watch's thread, which is the one that calls all but :meth:`close`.

    Attributes:
        signs: What ranks of other hosts say: for the first rank of all, each; for the first of another host, that one.
        failure: What has failed first, if the store knows of it.
    """

    def __init__(self, store: dist.Store, ranks: list[list[int]], rank: int, number: int, waiting: Waiting) -> None:
        self.signs: dict[int, Sign] = {}
        self.failure: Failure | None = None
        self._rank = rank
        self._ranks = ranks
        self._own = next(index for index, host in enumerate(ranks) if rank in host)
        self._tells = rank == ranks[self._own][0]
        self._hears_all = rank == ranks[0][0]
        self._interval_s = max(INTERVAL_S, 3 * len(ranks) / REQUESTS_PER_S)
        self._lost_s = LOST_S + self._interval_s
        self._own_signs: Mapping[int, Sign] = {}
        self._to_tell: Failure | None = None
        self._came_back_at = time.monotonic()
        self._heard_at = dict.fromkeys(range(len(ranks)), self._came_back_at)
        self._said_at = self._came_back_at - self._interval_s
        self._beats: dict[int, list[int]] = {}
        self._waiting = waiting
        self._lines = Lines(waiting)
        self._is_closed = False
        self._read_until = 0.0
        self._has_more = threading.Event()
        self._store = self._connect(store, rank, number)
        self._note_first()
        self._thread = threading.Thread(target=self._run, name="lightning-strategies-ext hosts", daemon=True)
        self._thread.start()

    def tell(self, signs: Mapping[int, Sign], failure: Failure | None) -> None:
        """Hands over what this host knows; returns at once."""
        self._own_signs = signs
        now, own = time.monotonic(), signs.get(self._rank, Sign(self._rank))
        if failure is not None and self._to_tell is None:
            self._to_tell = failure
            # Whatever has started this process may end it before the store knows.
            self._lines.say(replace(own, failure=failure).dump(_FAILURE_NUM_BYTES), to_all=True)
            self._has_more.set()
        elif self._hears_all and now - self._said_at >= self._interval_s:
            self._said_at = now
            self._lines.say(own.dump(_SIGN_NUM_BYTES))
        self._lines.say_rest()
        if not self._hears_all:
            self.signs |= self._said()

    def lost(self) -> list[int]:
        """The ranks of a host that does not answer any more, as far as this rank can know; or none."""
        now = time.monotonic()
        for ranks in self._ranks:
            if ranks[0] in self._lines.lost:
                return ranks
        if self._tells and not self._hears_all and not self._is_reached(0):
            return self._ranks[0] if now - self._came_back_at > self._lost_s else []
        if self._hears_all:
            for index, ranks in enumerate(self._ranks):
                is_silent = now - self._heard_at[index] > self._lost_s
                if index != self._own and is_silent and not self._is_reached(index):
                    return ranks
        return []

    def gone(self) -> set[int]:
        """The ranks of other hosts whose processes are known to have ended without a goodbye."""
        return self._lines.gone

    def told(self) -> Failure | None:
        """What has failed first: as the store has it, or else as other hosts say."""
        said = [sign.failure for sign in self._said().values() if sign.failure is not None]
        return self.failure or min(said, key=lambda failure: failure.time, default=None)

    def forget(self) -> None:
        """Lets time start anew: this process was stopped, say, or a stage begins."""
        now = time.monotonic()
        self._came_back_at = now
        self._heard_at = dict.fromkeys(self._heard_at, now)

    def close(self) -> None:
        """Ends the thread; waits a moment for it to tell what it has to, and for the others to read it.

        The watch's thread has ended before.
        """
        self._read_until = time.monotonic() + READ_S
        self._is_closed = True
        self._has_more.set()
        is_unread = self._hears_all and self.failure is not None
        deadline = time.monotonic() + INTERVAL_S + (READ_S if is_unread else 0.0)
        while self._thread.is_alive() and not self.lost() and time.monotonic() < deadline:
            self._waiting.wait(_POLL_S)  # for others that end
        self._lines.close()

    def _is_reached(self, index: int) -> bool:
        return self._ranks[index][0] in self._lines.reached

    def _said(self) -> dict[int, Sign]:
        return {rank: Sign.load(words) for rank, words in self._lines.said.items()}

    def _connect(self, store: dist.Store, rank: int, number: int) -> dist.Store:
        key, own = f"lightning_strategies_ext/hosts/{number}", own_connection(store)
        if rank == self._ranks[0][0]:
            token = secrets.token_hex(16)
            if isinstance(own, dist.TCPStore):
                self._lines.listen([host[0] for host in self._ranks[1:]], token, own.host, own.port)
            store.set(key, json.dumps([token, self._lines.address]))
        token, address = json.loads(store.get(key))
        if self._tells and not self._hears_all and address is not None:
            self._lines.call(Address(*address), self._ranks[0][0], token, rank)
        return dist.PrefixStore(f"lightning_strategies_ext/hosts/{token}", own)

    def _note_first(self) -> None:
        """Notes those that this rank is to hear of, some of whom may never come to say a word."""
        first = self._ranks[0][0]
        if self._hears_all:
            heard = [rank for host in self._ranks for rank in host if host is not self._ranks[self._own]]
        else:
            heard = [first] if first in self._lines.reached else []
        self.signs = {rank: Sign(rank) for rank in heard}

    def _run(self) -> None:
        while True:
            self._has_more.clear()
            try:
                self._exchange()
            except RuntimeError:  # it went away with its process
                return
            if self._is_closed and self._is_read():
                return
            interval_s = self._interval_s if self.failure is None else SOON_S
            self._has_more.wait(interval_s if self._tells else None)

    def _is_read(self) -> bool:
        if not self._hears_all or self.failure is None or time.monotonic() > self._read_until:
            return True
        others = {host[0] for host in self._ranks[1:]} - self._lines.gone - set(self.failure.ranks)
        return all(self.signs.get(rank, Sign(rank)).failure is not None for rank in others)

    def _exchange(self) -> None:
        store = self._store
        if self._to_tell is not None and self.failure is None:
            told = store.compare_set(_FAILURE, "", json.dumps(asdict(self._to_tell)))
            self.failure = Failure.load(json.loads(told))
        if self._tells:
            store.set(f"host/{self._own}", json.dumps([asdict(sign) for sign in self._own_signs.values()]))
            if self.failure is None and store.check([_FAILURE]):
                self.failure = Failure.load(json.loads(store.get(_FAILURE)))
        self._came_back_at = time.monotonic()
        if self._hears_all:
            for index in range(len(self._ranks)):
                if index != self._own and (index in self._beats or store.check([f"host/{index}"])):
                    self._hear(index, json.loads(store.get(f"host/{index}")))

    def _hear(self, index: int, content: list[dict[str, Any]]) -> None:
        signs = [Sign.of(values) for values in content]
        beats = [sign.beats for sign in signs]
        if beats != self._beats.get(index):
            self._beats[index] = beats
            self._heard_at[index] = time.monotonic()
        self.signs.update({sign.rank: sign for sign in signs})
