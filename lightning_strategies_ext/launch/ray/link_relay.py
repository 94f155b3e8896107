"""Links to a main process outside the cluster (Ray Client), to which no worker can connect.

Workers connect to a relay instead, an actor in the cluster. The main process receives their data and sends them signals
by calls of the relay's methods: from outside, only such calls are sure to reach the cluster.

Limitations: workers do not outlast a main process that requests no events for :data:`MAIN_PROCESS_TIMEOUT_S`.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from typing_extensions import override

from lightning_strategies_ext.launch.ray.worker_link import LinkServer, WorkerLink

#: Seconds that a call of :meth:`LinkRelayActor.events` waits for an event.
_CALL_S = 5.0
#: Seconds after which a main process that requests no events counts as exited. Ray reconnects within 30.
MAIN_PROCESS_TIMEOUT_S = 60.0
_MAX_EVENTS = 1000

#: Number of a worker, and the data that its link has received; None if the link is closed.
Event = tuple[int, bytes | None]


# --- in the cluster ---


class LinkRelayActor:
    """The relay. Its methods may run concurrently, each in a thread.

    Args:
        silence_s: Seconds after which a main process that requests no events counts as exited. The relay then exits,
            which closes the links and so terminates the workers.
    """

    def __init__(self, silence_s: float) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._link_server = _RelayLinkServer(ray.util.get_node_ip_address(), self._events)
        self._silence_s = silence_s
        self._last_call_at = time.monotonic()
        threading.Thread(target=self._exit_after_timeout, daemon=True, name="lightning-strategies-ext relay").start()

    def endpoint(self) -> tuple[tuple[str, int], bytes]:
        """Returns the address and port that workers connect to, and the secret that they prove to have."""
        return self._link_server.address, self._link_server.secret

    def expect(self, number: int) -> None:
        """Creates the link of a worker that is about to be started."""
        self._link_server.expect(number, lambda: self._events.put((number, None)))

    def events(self) -> list[Event]:
        """Returns new events, after a short wait if there are none."""
        self._last_call_at = time.monotonic()
        found: list[Event] = []
        with suppress(queue.Empty):
            found.append(self._events.get(timeout=_CALL_S))
            while len(found) < _MAX_EVENTS:
                found.append(self._events.get_nowait())
        return found

    def send_bytes(self, number: int, data: bytes) -> None:
        """Sends bytes to a worker."""
        self._link_server.send_bytes(number, data)

    def _exit_after_timeout(self) -> None:
        while time.monotonic() - self._last_call_at < self._silence_s:
            time.sleep(1)
        os._exit(1)


class _RelayLinkServer(LinkServer):
    """Server whose links forward what they receive as events."""

    def __init__(self, address: str, events: "queue.SimpleQueue[Event]") -> None:
        self._events = events
        super().__init__(address)

    @override
    def expect(self, number: int, on_update: Callable[[], None]) -> WorkerLink:
        link = self._links[number] = _RelayedLink(number, self._events, on_update)
        return link

    def send_bytes(self, number: int, data: bytes) -> None:
        link = self._links[number]
        assert isinstance(link, _RelayedLink)
        link.send_bytes(data)


class _RelayedLink(WorkerLink):
    def __init__(self, number: int, events: "queue.SimpleQueue[Event]", on_update: Callable[[], None]) -> None:
        super().__init__(on_update)
        self._number = number
        self._events = events

    @override
    def receive(self, data: bytes) -> None:
        self._events.put((self._number, data))

    def send_bytes(self, data: bytes) -> None:
        connected = self._connected
        if connected is not None:
            with suppress(OSError):
                connected.sendall(data)


# --- in the main process ---


class RelayedLinkServer:
    """A :class:`.LinkServer` whose links end at a relay in the cluster."""

    def __init__(self) -> None:
        self._relay: Any = (
            ray.remote(LinkRelayActor).options(num_cpus=0, max_concurrency=4).remote(MAIN_PROCESS_TIMEOUT_S)
        )
        self.address, self.secret = ray.get(self._relay.endpoint.remote())
        self._links: dict[int, WorkerLink] = {}
        self._is_open = True
        threading.Thread(target=self._receive, daemon=True, name="lightning-strategies-ext links").start()

    def expect(self, number: int, on_update: Callable[[], None]) -> WorkerLink:
        """Creates the link of a worker, like :meth:`.LinkServer.expect`."""
        link = self._links[number] = WorkerLink(on_update)
        ray.get(self._relay.expect.remote(number))
        link.connect(_RelayedSocket(self._relay, number))  # type: ignore[arg-type]
        return link

    def close(self) -> None:
        """Closes all links, and kills the relay."""
        self._is_open = False
        with suppress(Exception):  # Ray may have exited
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
        except Exception:  # the relay or the cluster has exited, or the connection is lost
            self._close_links()


class _RelayedSocket:
    """The part of a socket that a :class:`.WorkerLink` uses; sends through the relay."""

    def __init__(self, relay: Any, number: int) -> None:
        self._relay = relay
        self._number = number

    def sendall(self, data: bytes) -> None:
        try:
            self._relay.send_bytes.remote(self._number, data)
        except Exception as error:
            raise OSError("the cluster is unavailable") from error

    def close(self) -> None:
        pass
