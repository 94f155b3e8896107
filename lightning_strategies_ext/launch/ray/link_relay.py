"""Lines to a main process outside of the cluster (Ray Client), where no worker can connect to it.

An actor in the cluster takes its part: workers connect to it, and the main process gets what they say, and sends them
signals, by calls of its methods, the only thing that surely goes from there into the cluster.

What it does not promise: that workers outlast a main process that says nothing for :data:`MAIN_PROCESS_TIMEOUT_S`.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray

from lightning_strategies_ext.launch.ray.worker_link import LinkServer, WorkerLink

#: How long a call waits for something to tell, in seconds.
_CALL_S = 5.0
#: After how long the main process counts as gone, in seconds. Ray's own connection comes back within 30.
MAIN_PROCESS_TIMEOUT_S = 60.0
_MAX_EVENTS = 1000

#: Which worker, and what came from it; None if it is gone.
Event = tuple[int, bytes | None]


# --- in the cluster ---


class LinkRelayActor:
    """The actor. Several of its methods run at once, each in a thread.

    Args:
        silence_s: After how long the main process counts as gone, in seconds: the actor ends then, and the workers with
            it, for their lines break.
    """

    def __init__(self, silence_s: float) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._link_server = _RelayLinkServer(ray.util.get_node_ip_address(), self._events)
        self._silence_s = silence_s
        self._heard_at = time.monotonic()
        threading.Thread(target=self._watch, daemon=True, name="lightning-strategies-ext relay").start()

    def endpoint(self) -> tuple[tuple[str, int], bytes]:
        """Where workers connect to, and what they say then."""
        return self._link_server.address, self._link_server.secret

    def expect(self, number: int) -> None:
        """See :meth:`.LinkServer.expect`."""
        self._link_server.expect(number, lambda: self._events.put((number, None)))

    def events(self) -> list[Event]:
        """Waits a moment for what workers say."""
        self._heard_at = time.monotonic()
        found: list[Event] = []
        with suppress(queue.Empty):
            found.append(self._events.get(timeout=_CALL_S))
            while len(found) < _MAX_EVENTS:
                found.append(self._events.get_nowait())
        return found

    def send_bytes(self, number: int, data: bytes) -> None:
        """Sends bytes to a worker."""
        self._link_server.send_bytes(number, data)

    def _watch(self) -> None:
        while time.monotonic() - self._heard_at < self._silence_s:
            time.sleep(1)
        os._exit(1)


class _RelayLinkServer(LinkServer):
    """One whose lines are shown elsewhere."""

    def __init__(self, address: str, events: "queue.SimpleQueue[Event]") -> None:
        self._events = events
        super().__init__(address)

    def expect(self, number: int, on_update: Callable[[], None]) -> WorkerLink:
        link = self._links[number] = _RelayedLink(number, self._events, on_update)
        return link

    def send_bytes(self, number: int, data: bytes) -> None:
        """Sends bytes to a worker, if it is there."""
        link = self._links[number]
        assert isinstance(link, _RelayedLink)
        link.send_bytes(data)


class _RelayedLink(WorkerLink):
    def __init__(self, number: int, events: "queue.SimpleQueue[Event]", on_update: Callable[[], None]) -> None:
        super().__init__(on_update)
        self._number = number
        self._events = events

    def receive(self, data: bytes) -> None:
        self._events.put((self._number, data))

    def send_bytes(self, data: bytes) -> None:
        """Sends bytes to the worker, if it is there."""
        connected = self._connected
        if connected is not None:
            with suppress(OSError):
                connected.sendall(data)


# --- in the main process ---


class RelayedLinkServer:
    """A :class:`.LinkServer` whose lines end in the cluster, and here by way of Ray Client."""

    def __init__(self) -> None:
        self._relay: Any = (
            ray.remote(LinkRelayActor).options(num_cpus=0, max_concurrency=4).remote(MAIN_PROCESS_TIMEOUT_S)
        )
        self.address, self.secret = ray.get(self._relay.endpoint.remote())
        self._links: dict[int, WorkerLink] = {}
        self._is_open = True
        threading.Thread(target=self._receive, daemon=True, name="lightning-strategies-ext lines").start()

    def expect(self, number: int, on_update: Callable[[], None]) -> WorkerLink:
        """See :meth:`.LinkServer.expect`."""
        link = self._links[number] = WorkerLink(on_update)
        ray.get(self._relay.expect.remote(number))
        link.connect(_RelayedSocket(self._relay, number))  # type: ignore[arg-type]
        return link

    def close(self) -> None:
        """Ends all lines, and the actor."""
        self._is_open = False
        with suppress(Exception):  # Ray may be gone
            ray.kill(self._relay)
        self._close_links()

    def _close_links(self) -> None:
        for link in list(self._links.values()):
            link.close()

    def _receive(self) -> None:
        try:
            while self._is_open:
                for number, data in ray.get(self._relay.events.remote()):
                    if data is None:
                        self._links[number].close()
                    else:
                        self._links[number].receive(data)
        except Exception:  # the actor, the cluster or the connection to it is gone
            self._close_links()


class _RelayedSocket:
    """What a :class:`.WorkerLink` does with its connection."""

    def __init__(self, relay: Any, number: int) -> None:
        self._relay = relay
        self._number = number

    def sendall(self, data: bytes) -> None:
        try:
            self._relay.send_bytes.remote(self._number, data)
        except Exception as error:
            raise OSError("the cluster is gone") from error

    def close(self) -> None:
        pass
