"""Requests of a rank to the elastic driver, which runs within ``horovodrun``.

The driver serves a key-value store over HTTP. It answers a rank's request for a slot when all running ranks have
requested one and the driver has enough slots. Horovod would send the request from C++, within ``hvd.init()``, where
``std::terminate`` aborts a rank that is not needed any more, or that waits for a rank that never joins (0.28.1). This
module therefore sends the request from Python, waits until all ranks of the new world have done so, and initializes
Horovod only then.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import Any

from torch.distributed import Store

from lightning_strategies_ext._system.connections import record_connections, shut_down_connections
from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.elastic.membership import Member, MembershipServiceError, peers_of
from lightning_strategies_ext.failure.elastic_monitor import elastic_monitor
from lightning_strategies_ext.horovod.launch_info import LaunchInfo
from lightning_strategies_ext.horovod.runtime import shut_down

_ELASTIC_VARIABLE = "HOROVOD_ELASTIC"
#: Environment variables with the numbers of a slot, in the order of the driver's reply.
_SLOT_VARIABLES = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
)
#: Prefix of this package's keys in the store, which the driver clears whenever it assigns slots.
_SCOPE = "lightning_strategies_ext"
#: Time for which ranks wait for a new rank to reach ``fit``, in seconds. No process reports to them that it has exited.
JOIN_TIMEOUT_S = 120.0
#: Timeout for the driver's reply to a request that it can answer immediately, in seconds.
REPLY_TIMEOUT_S = 1.0
_POLL_INTERVAL_S = 0.02
#: Maximum number of requests that all ranks together send per second to the driver, which is one Python process.
MAX_REQUESTS_PER_S = 500
_membership: "DriverMembership | None" = None
_has_been_initialized = False
#: Local and remote addresses of Horovod's connections in this world.
_connections: set[tuple[Any, Any]] = set()


def is_elastic_launch() -> bool:
    """Returns whether ``horovodrun`` has started this process with a discovery script."""
    return os.environ.get(_ELASTIC_VARIABLE) == "1"


class DriverMembership:
    """A :class:`.elastic.membership.Membership` whose ranks the elastic driver assigns.

    Args:
        launch: Slot for which the driver has started this process.

    Attributes:
        launch: Slot of this rank in the current world.
        members: Members of the current world, in the order of ranks.
        has_joined: Whether this rank takes part in training.

    Raises:
        RuntimeError: If not all ranks of the first world join in time.
    """

    waiting_reason = (
        "`horovodrun` waits for more hosts, up to its `--elastic-timeout`, if fewer than `--min-np` ranks remain."
    )
    no_rank_reason = "its host was removed, or is blacklisted because a rank on it has exited"
    sigterm_consequence = "horovodrun ends the job if too few ranks remain"

    def __init__(self, launch: LaunchInfo) -> None:
        self.launch = launch
        self.members: list[Member] = []
        if not self.rendezvous(Member(Peer.this_process(launch.rank)), lambda waited_s: None):
            raise RuntimeError(
                f"Rank {launch.rank}: not all {launch.size} ranks joined within {JOIN_TIMEOUT_S:.0f} s. Do less in"
                " the script before `fit`, or check in the output of the other ranks why they exited."
            )
        self.has_joined = all(member.is_new for member in self.members)

    def next_rank(self, on_wait: Callable[[float], None]) -> int | None:
        """Requests a slot from the driver; None if the discovery script does not list this rank's host any more."""
        key = f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"
        replies: list[bytes | Exception] = []

        def request() -> None:
            try:
                replies.append(_request("GET", f"rank_and_size/{key}"))
            except Exception as error:
                replies.append(error)

        thread = threading.Thread(target=request, name="elastic-slot", daemon=True)
        started = time.monotonic()
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_INTERVAL_S)
            on_wait(time.monotonic() - started)
        reply = replies[0]
        if isinstance(reply, Exception):
            raise reply
        if not reply:
            raise MembershipServiceError("The elastic driver has no response for this rank")
        numbers = reply.decode().split(",")
        if int(numbers[0]) < 0:
            return None
        # Horovod's native code reads these variables, and so does the next Trainer.
        os.environ.update(zip(_SLOT_VARIABLES, numbers, strict=True))
        launch = LaunchInfo.from_environment()
        assert launch is not None
        self.launch = launch
        return launch.rank

    def rendezvous(self, member: Member, on_wait: Callable[[float], None]) -> bool:
        """Waits at most :data:`JOIN_TIMEOUT_S` until all ranks have joined, then initializes Horovod."""
        members: list[Member] = []
        launch, is_published = self.launch, False
        started = time.monotonic()
        while len(members) < launch.size:
            # A driver that has ended the job may still accept requests, without a reply.
            with suppress(TimeoutError):
                if not is_published:
                    _request("PUT", f"{_SCOPE}/{launch.rank}of{launch.size}", member.encoded(), REPLY_TIMEOUT_S)
                    is_published = True
                value = _request("GET", f"{_SCOPE}/{len(members)}of{launch.size}", timeout_s=REPLY_TIMEOUT_S)
                if value:
                    members.append(Member.decoded(value))
                    continue
            waited = time.monotonic() - started
            if waited > JOIN_TIMEOUT_S:
                return False
            on_wait(waited)
            time.sleep(max(_POLL_INTERVAL_S, launch.size / MAX_REQUESTS_PER_S))
        _initialize()
        self.members = members
        return True

    def detect_host_loss(self, store: Store) -> None:
        """Makes this rank's collectives fail after the loss of a host. Collective: all ranks of the world call it.

        Args:
            store: Store that the ranks of this world share.
        """
        elastic_monitor().enter_world(self.launch.rank, peers_of(self.members), _disconnect, link_store=store)

    def leave(self, *, is_coordinated: bool) -> None:
        """Shuts Horovod down. If not all ranks leave together, first closes its connections, so that no rank waits."""
        elastic_monitor().leave_world(is_coordinated=is_coordinated)
        if not is_coordinated:
            _disconnect()
        shut_down()

    def is_peer_loss(self, error: BaseException) -> bool:
        """Returns whether an exception is caused by an error with which Horovod reports the loss of a rank."""
        from horovod.common.exceptions import HorovodInternalError

        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, HorovodInternalError):
                return True
            cause = cause.__cause__ or cause.__context__
        return False

    def listen(self) -> "HostChangeListener":
        """Starts the detection of added and removed hosts."""
        return HostChangeListener()


def membership(launch: LaunchInfo) -> DriverMembership:
    """Returns the membership of this process. The first call creates it and waits for the other ranks.

    Raises:
        RuntimeError: If not all ranks join in time.
    """
    global _membership
    if _membership is None:
        _membership = DriverMembership(launch)
    return _membership


def leave() -> None:
    """Leaves the current world, if there is one, and aborts the collectives of its other ranks."""
    if _membership is not None:
        _membership.leave(is_coordinated=False)


def _initialize() -> None:
    # Uses the slot in the environment variables.
    import horovod.torch as hvd

    global _has_been_initialized
    if _has_been_initialized:
        # Without the variable, Horovod requests no slot. At the first call it has stored that the job is elastic.
        del os.environ[_ELASTIC_VARIABLE]
    _connections.clear()
    try:
        with record_connections(_connections):
            hvd.init()
    finally:
        os.environ[_ELASTIC_VARIABLE] = "1"
    _has_been_initialized = True


def _disconnect() -> None:
    # Closes Horovod's connections to the other ranks of this world. After a shutdown some remain open (0.28.1), and a
    # rank that waits for data of this rank would notice only after gloo's timeout of 30 s.
    shut_down_connections(lambda connection: (connection.laddr, connection.raddr) in _connections)


class HostChangeListener:
    """Receives the driver's notifications of added and removed hosts, which it sends to rank 0 only.

    Attributes:
        has_changed: Whether a notification has arrived since the last assignment of False.
    """

    def __init__(self) -> None:
        from horovod.common.elastic import notification_manager

        self.has_changed = False
        self._manager = notification_manager
        self._manager.init()
        self._manager.register_listener(self)

    def on_hosts_updated(self, timestamp: int, update: int) -> None:
        """Records the change. Called by Horovod, on another thread."""
        self.has_changed = True

    def close(self) -> None:
        """Stops receiving notifications."""
        self._manager.remove_listener(self)


def _request(method: str, path: str, body: bytes | None = None, timeout_s: float | None = None) -> bytes:
    """Returns the response of the driver's store, which is empty if the store has no value.

    Raises:
        MembershipServiceError: If the driver does not respond.
        TimeoutError: If no response arrives in time.
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
        raise MembershipServiceError(f"The elastic driver at {address}:{port} does not respond: {error}") from error
    finally:
        connection.close()
    return content if response.status == 200 else b""
