"""Between hosts: one rank of each tells the others what its host's board says, and a host that is gone falls silent.

A thread does it that may wait for the store, on a connection of its own; the watch, which waits for nobody, only looks
at what the thread has brought, and at when it came back last. Of ``n`` hosts, each asks the store for two things per
interval, and that of rank 0 for ``n`` more: at most :data:`REQUESTS_PER_S` together, however many ranks there are. When
the process goes that tells for its host, its line to the first rank says so at once, see :mod:`.lines`; what it knew to
have failed, it has said there before.
"""

import json
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from lightning_strategies_ext.connections import own_connection
from lightning_strategies_ext.failure.lines import Address, Lines
from lightning_strategies_ext.failure.signs import Failure, Sign

#: How often a host tells what it knows, in seconds, if there are not so many that it takes longer.
INTERVAL_S = 1.0
REQUESTS_PER_S = 1000
#: The same once something has failed, and how long the first rank waits at its end for the others to know: they read it
#: in a store that goes with it, as a rule.
SOON_S = 0.25
READ_S = 3.0
#: A host that has told nothing for so long is gone, in seconds.
LOST_S = 8.0
_FAILURE = "failure"


class Hosts:
    """What one rank knows of the other hosts.

    Args:
        store: The store that all ranks share.
        ranks: Those of each host, in the order of their first; the same on all ranks.
        rank: Global rank of this process.
        number: Tells these from others with the same store.

    Attributes:
        signs: What the ranks of other hosts say, for the first rank of all; nothing for the others.
        failure: What has failed first, if the store knows of it.
    """

    def __init__(self, store: dist.Store, ranks: list[list[int]], rank: int, number: int) -> None:
        self.signs: dict[int, Sign] = {}
        self.failure: Failure | None = None
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
        self._beats: dict[int, list[int]] = {}
        self._lines = Lines()
        self._is_closed = False
        self._read_until = 0.0
        self._store = self._connect(store, rank, number)
        self._thread = threading.Thread(target=self._run, name="lightning-strategies-ext hosts", daemon=True)
        self._thread.start()

    def tell(self, signs: Mapping[int, Sign], failure: Failure | None) -> None:
        """Hands over what this host knows; returns at once."""
        self._own_signs = signs
        if failure is not None and self._to_tell is None:
            self._to_tell = failure
            # Whatever has started this process may end it before the store knows.
            self._lines.say(json.dumps(asdict(failure)).encode())
            self._lines.wake()

    def lost(self) -> list[int]:
        """The ranks of a host that has told nothing for :data:`LOST_S`, as far as this rank can know; or none."""
        now = time.monotonic()
        if self._tells and not self._hears_all and now - self._came_back_at > self._lost_s:
            return self._ranks[0]
        if self._hears_all:
            for index, ranks in enumerate(self._ranks):
                if index != self._own and now - self._heard_at[index] > self._lost_s:
                    return ranks
        return []

    def gone(self) -> set[int]:
        """The ranks of other hosts whose processes are known to have ended without a goodbye."""
        return self._lines.gone

    def told(self) -> Failure | None:
        """What has failed first: as the store has it, or else as other hosts say."""
        said = [Failure.load(json.loads(words)) for words in self._lines.said.copy().values()]
        return self.failure or min(said, key=lambda failure: failure.time, default=None)

    def forget(self) -> None:
        """Lets time start anew: this process was stopped, say, or a stage begins."""
        now = time.monotonic()
        self._came_back_at = now
        self._heard_at = dict.fromkeys(self._heard_at, now)

    def close(self) -> None:
        """Ends the thread; waits a moment for it to tell what it has to, and for the others to read it."""
        self._read_until = time.monotonic() + READ_S
        self._is_closed = True
        self._lines.wake()
        is_unread = self._hears_all and self.failure is not None
        if not self.lost():
            self._thread.join(INTERVAL_S + (READ_S if is_unread else 0.0))
        self._lines.say_goodbye()
        if not self._thread.is_alive():
            self._lines.close()

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

    def _run(self) -> None:
        has_store = True
        while True:
            try:
                if has_store:
                    self._exchange()
            except RuntimeError:  # it went away with its process: `lost` says so when the time has come
                has_store = False
            if self._is_closed and (not has_store or self._is_read()):
                return
            interval_s = self._interval_s if self.failure is None else SOON_S
            self._lines.wait(interval_s if self._tells and has_store else None)

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
