"""What a rank and the elastic driver, which runs within ``horovodrun``, say to each other.

The driver has a key-value store, served over HTTP. A rank that asks it for its place gets an answer when all ranks that
are alive have asked and the driver has enough slots. Horovod would ask in C++, within ``hvd.init()``, where a rank that
is not wanted any more, or that waits for one that never comes, is aborted by ``std::terminate`` (0.28.1). So we ask in
Python, wait for all ranks of the new world to be there, and only then initialise Horovod.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any

import psutil

from lightning_strategies_ext.failure.reconciliation import Peer, shut_down_connections
from lightning_strategies_ext.horovod.runtime import Launch

_ELASTIC = "HOROVOD_ELASTIC"
#: What the driver answers, in this order.
_PLACE = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
)
#: Our part of the store. The driver empties the store whenever it gives out places.
_SCOPE = "lightning_strategies_ext"
#: How long ranks wait for a new one to come as far as ``fit``, in seconds. It may have died, which nobody tells them.
JOIN_TIMEOUT_S = 120.0
#: How long the driver may take to answer what needs no waiting, in seconds.
ANSWER_TIMEOUT_S = 1.0
_POLL_INTERVAL_S = 0.02
#: How many requests all ranks together may send to the driver, which is one Python process.
REQUESTS_PER_S = 500
_has_been_initialised = False
#: Local and remote addresses of Horovod's connections in this world.
_connections: set[tuple[Any, Any]] = set()


class DriverGoneError(RuntimeError):
    """The elastic driver does not answer: ``horovodrun`` has ended."""


@dataclass(frozen=True)
class Member:
    """A rank of a world, as it was when it came.

    Attributes:
        peer: Where it runs.
        fit: Number of the ``fit`` that it is in, counted in its process; 0 if it has not been in one.
        batches: Batches that were done at its last commit; -1 without one.
        step: Optimizer steps that were.
        done: Optimizer steps that it had done when it came.
    """

    peer: Peer
    fit: int = 0
    batches: int = -1
    step: int = -1
    done: int = 0

    @property
    def is_new(self) -> bool:
        """Whether its process has just started."""
        return self.fit == 0

    def encoded(self) -> bytes:
        """As the driver's store keeps it."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, value: bytes) -> "Member":
        """The reverse of :meth:`encoded`."""
        fields = json.loads(value)
        return cls(**{**fields, "peer": Peer(**fields["peer"])})


def is_there() -> bool:
    """Whether ``horovodrun`` has started this process as one of a changing number of ranks."""
    return os.environ.get(_ELASTIC) == "1"


def next_place(while_waiting: Callable[[float], None]) -> Launch | None:
    """Says that this rank has left the world and is ready for the next; waits for its place in it.

    Args:
        while_waiting: Called several times per second with the seconds waited so far; may raise to give up.

    Returns:
        The place; None if this rank's host is no longer among those of the discovery script.

    Raises:
        DriverGoneError: If there is no driver any more.
    """
    key = f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"
    answer: list[bytes | Exception] = []

    def ask() -> None:
        try:
            answer.append(_request("GET", f"rank_and_size/{key}"))
        except Exception as error:
            answer.append(error)

    thread = threading.Thread(target=ask, name="elastic-place", daemon=True)
    started = time.monotonic()
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_INTERVAL_S)
        while_waiting(time.monotonic() - started)
    if isinstance(answer[0], Exception):
        raise answer[0]
    if not answer[0]:
        raise DriverGoneError("The elastic driver has no answer for this rank")
    numbers = answer[0].decode().split(",")
    if int(numbers[0]) < 0:
        return None
    # For what reads them: Horovod's C++, and Trainers to come.
    os.environ.update(zip(_PLACE, numbers, strict=True))
    launch = Launch.find()
    assert launch is not None
    return launch


def meet(launch: Launch, member: Member, while_waiting: Callable[[float], None]) -> list[Member] | None:
    """Waits until all ranks of a world are there.

    Args:
        launch: The place of this rank.
        member: This rank.
        while_waiting: See :func:`next_place`.

    Returns:
        The ranks in their order; None if some did not come in :data:`JOIN_TIMEOUT_S`.

    Raises:
        DriverGoneError: If there is no driver any more.
    """
    members: list[Member] = []
    is_said = False
    started = time.monotonic()
    while len(members) < launch.size:
        # A driver that has ended the job may still take requests, and answers none.
        with suppress(TimeoutError):
            if not is_said:
                _request("PUT", f"{_SCOPE}/{launch.rank}of{launch.size}", member.encoded(), ANSWER_TIMEOUT_S)
                is_said = True
            value = _request("GET", f"{_SCOPE}/{len(members)}of{launch.size}", timeout_s=ANSWER_TIMEOUT_S)
            if value:
                members.append(Member.decoded(value))
                continue
        waited = time.monotonic() - started
        if waited > JOIN_TIMEOUT_S:
            return None
        while_waiting(waited)
        time.sleep(max(_POLL_INTERVAL_S, launch.size / REQUESTS_PER_S))
    return members


def initialise() -> None:
    """Initialises Horovod for the place that the environment variables say."""
    import horovod.torch as hvd

    global _has_been_initialised
    before = _connections_now()
    if _has_been_initialised:
        # Without the variable it does not ask the driver. That the run is elastic it remembers from the first time.
        del os.environ[_ELASTIC]
    try:
        hvd.init()
    finally:
        os.environ[_ELASTIC] = "1"
    _has_been_initialised = True
    _connections.clear()
    _connections.update(_connections_now() - before)


def disconnect() -> None:
    """Closes the connections to the other ranks that Horovod has made for this world.

    It keeps some when it is shut down (0.28.1), and a rank that waits at the other end of one for what we will never
    send would do so for 30 s, the timeout of gloo.
    """
    shut_down_connections(lambda connection: (connection.laddr, connection.raddr) in _connections)


def _connections_now() -> set[tuple[Any, Any]]:
    found = psutil.Process().net_connections("tcp")
    return {(connection.laddr, connection.raddr) for connection in found if connection.raddr}


class HostNotices:
    """Hears from the driver, which tells rank 0 only, that hosts have come or gone.

    Attributes:
        has_come: Whether a notice has come since it was last set to False.
    """

    def __init__(self) -> None:
        from horovod.common.elastic import notification_manager

        self.has_come = False
        self._manager = notification_manager
        self._manager.init()
        self._manager.register_listener(self)

    def on_hosts_updated(self, timestamp: int, update: int) -> None:
        """Called by Horovod, on a thread of its own."""
        self.has_come = True

    def close(self) -> None:
        """Hears no more."""
        self._manager.remove_listener(self)


def _request(method: str, path: str, body: bytes | None = None, timeout_s: float | None = None) -> bytes:
    """What the driver's store answers; nothing where it has nothing.

    Raises:
        DriverGoneError: If nobody is there.
        TimeoutError: If no answer comes in time.
    """
    address, port = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    connection = HTTPConnection(address, int(port), timeout=timeout_s)
    try:
        connection.request(method, f"/{path}", body)
        response = connection.getresponse()
        content = response.read()
    except TimeoutError:
        raise
    except (OSError, HTTPException) as error:
        raise DriverGoneError(f"The elastic driver at {address}:{port} does not answer: {error}") from error
    finally:
        connection.close()
    return content if response.status == 200 else b""
