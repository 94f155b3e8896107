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

_ELASTIC = "HOROVOD_ELASTIC"
#: What the driver answers, in this order.
_SLOT = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
)
#: Our part of the store. The driver empties the store whenever it gives out slots.
_SCOPE = "lightning_strategies_ext"
#: Seconds that ranks wait for a new rank to reach ``fit``. It may have exited, which no process reports to them.
JOIN_TIMEOUT_S = 120.0
#: How long the driver may take to answer what needs no waiting, in seconds.
ANSWER_TIMEOUT_S = 1.0
_POLL_INTERVAL_S = 0.02
#: How many requests all ranks together may send to the driver, which is one Python process.
REQUESTS_PER_S = 500
_membership: "DriverMembership | None" = None
_has_been_initialized = False
#: Local and remote addresses of Horovod's connections in this world.
_connections: set[tuple[Any, Any]] = set()


def is_elastic_launch() -> bool:
    """Whether ``horovodrun`` has started this process as one of a changing number of ranks."""
    return os.environ.get(_ELASTIC) == "1"


class DriverMembership:
    """A rank of Horovod's that the elastic driver numbers; see :class:`.elastic.membership.Membership`.

    Args:
        launch: The slot that the driver has started this process for.

    Attributes:
        launch: The slot that this rank has now.
        members: The ranks of the world that this one is in.
        has_joined: Whether this rank takes part in training.

    Raises:
        RuntimeError: If some of the ranks with which this process was started do not come.
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
        """Asks the driver for a slot; None if this rank's host is no longer among those of the discovery script."""
        key = f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"
        answer: list[bytes | Exception] = []

        def ask() -> None:
            try:
                answer.append(_request("GET", f"rank_and_size/{key}"))
            except Exception as error:
                answer.append(error)

        thread = threading.Thread(target=ask, name="elastic-slot", daemon=True)
        started = time.monotonic()
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_INTERVAL_S)
            on_wait(time.monotonic() - started)
        if isinstance(answer[0], Exception):
            raise answer[0]
        if not answer[0]:
            raise MembershipServiceError("The elastic driver has no response for this rank")
        numbers = answer[0].decode().split(",")
        if int(numbers[0]) < 0:
            return None
        # For what reads them: Horovod's C++, and Trainers to come.
        os.environ.update(zip(_SLOT, numbers, strict=True))
        launch = LaunchInfo.from_environment()
        assert launch is not None
        self.launch = launch
        return launch.rank

    def rendezvous(self, member: Member, on_wait: Callable[[float], None]) -> bool:
        """Waits until all ranks are there, for :data:`JOIN_TIMEOUT_S`; then initializes Horovod."""
        members: list[Member] = []
        launch, is_said = self.launch, False
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
                return False
            on_wait(waited)
            time.sleep(max(_POLL_INTERVAL_S, launch.size / REQUESTS_PER_S))
        _initialize()
        self.members = members
        return True

    def detect_host_loss(self, store: Store) -> None:
        """Makes this rank's collectives fail once another host is lost. Collective: all ranks of the world call it.

        Args:
            store: Store that the ranks of this world share.
        """
        elastic_monitor().enter_world(self.launch.rank, peers_of(self.members), _disconnect, link_store=store)

    def leave(self, *, is_coordinated: bool) -> None:
        """Shuts Horovod down; its connections too, if others may wait at their ends."""
        elastic_monitor().leave_world(is_coordinated=is_coordinated)
        if not is_coordinated:
            _disconnect()
        shut_down()

    def is_peer_loss(self, error: BaseException) -> bool:
        """Whether an exception comes from Horovod's telling that another rank is gone."""
        from horovod.common.exceptions import HorovodInternalError

        at: BaseException | None = error
        while at is not None:
            if isinstance(at, HorovodInternalError):
                return True
            at = at.__cause__ or at.__context__
        return False

    def listen(self) -> "HostChangeListener":
        """Begins to hear of hosts that come or go."""
        return HostChangeListener()


def membership(launch: LaunchInfo) -> DriverMembership:
    """That of this process; the same again when called again. The first call waits for the other ranks.

    Raises:
        RuntimeError: If some do not come.
    """
    global _membership
    if _membership is None:
        _membership = DriverMembership(launch)
    return _membership


def leave() -> None:
    """Leaves the other ranks, some of whom may wait for this one, if this process has joined any."""
    if _membership is not None:
        _membership.leave(is_coordinated=False)


def _initialize() -> None:
    # For the slot that the environment variables say.
    import horovod.torch as hvd

    global _has_been_initialized
    if _has_been_initialized:
        # Without the variable it does not ask the driver. That the run is elastic it remembers from the first time.
        del os.environ[_ELASTIC]
    _connections.clear()
    try:
        with record_connections(_connections):
            hvd.init()
    finally:
        os.environ[_ELASTIC] = "1"
    _has_been_initialized = True


def _disconnect() -> None:
    # Closes the connections to the other ranks that Horovod has made for this world. It keeps some when it is shut down
    # (0.28.1), and a rank that waits at the other end of one for what we will never send would do so for 30 s, the
    # timeout of gloo.
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
        """Called by Horovod, on a thread of its own."""
        self.has_changed = True

    def close(self) -> None:
        """Stops receiving."""
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
