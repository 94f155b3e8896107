"""Descriptor store: a process that holds memory files for ranks that torchrun restarts, one for each job on a host.

After a failure, torchrun's agent terminates all ranks of its host and starts them again. Their commits are in unnamed
memory files, which the kernel frees with their last descriptor. The store holds these descriptors: a rank sends each
under a name, and the restarted rank requests them. Ranks write commits to the memory directly, not through the store.

The first rank that needs the store starts it. The store exits when the agent exits for any reason, which frees the
memory; no cleanup is needed. Its socket has a random address, stored in a file in the user's cache, so that other users
cannot bind the address first. Both ends of a connection compare user ids. Linux only.
"""

import hashlib
import json
import math
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from lightning_strategies_ext._system import user_cache
from lightning_strategies_ext._system.interpreters import python_module
from lightning_strategies_ext._system.peers import host_identity, is_of_this_user, is_running, start_time
from lightning_strategies_ext._system.selector_loop import SelectorLoop

#: Environment variable in which torchrun passes the id of the job to its ranks.
RUN_ID_VARIABLE = "TORCHELASTIC_RUN_ID"
#: Time within which a store must start, in seconds.
START_TIMEOUT_S = 60.0
_POLL_S = 0.02
#: Interval at which the store checks whether the agent runs, in seconds; used only without pidfds.
_AGENT_POLL_S = 1.0
_MESSAGE_BYTES = 1 << 16
_MAX_FILES = 250  # Linux sends at most 253


class FdStoreLostError(RuntimeError):
    """The descriptor store has exited, does not respond, or could not be started."""


@dataclass(frozen=True)
class TorchrunJob:
    """A torchrun job on this host.

    Attributes:
        run_id: Id of the job, from torchrun.
        agent_pid: Process id of torchrun's agent on this host.
        agent_start: Start time of the agent, because another process may get its process id later.
    """

    run_id: str
    agent_pid: int
    agent_start: float

    @classmethod
    def this_process(cls) -> "TorchrunJob | None":
        """Returns the job of this process; None if torchrun has not started the process.

        The agent is the nearest ancestor without the job's environment variable: a shell may run between the agent and
        a rank. If /proc is missing or hides the ancestors, the agent is the parent.
        """
        run_id = os.environ.get(RUN_ID_VARIABLE)
        if run_id is None:
            return None
        agent_pid = os.getppid()
        with suppress(psutil.Error, OSError):
            ancestors = psutil.Process().parents()
            for ancestor in ancestors:
                agent_pid = ancestor.pid
                with suppress(psutil.Error):  # the process of another user, or exited
                    if ancestor.environ().get(RUN_ID_VARIABLE) == run_id:
                        continue
                break
            else:
                if ancestors:  # all ancestors have the variable, so no agent has set it for this process
                    return None
        # 0 means that the parent is outside the container; its exit cannot be detected.
        return cls(run_id, agent_pid, start_time(agent_pid)) if agent_pid else None

    @property
    def address_file(self) -> Path:
        """Path of the file with the address of the store's socket. The store locks the file while it runs.

        Raises:
            OSError: If no directory is writable by this user only.
        """
        name = json.dumps([host_identity(), self.agent_pid, self.agent_start, self.run_id])
        return _directory() / hashlib.sha256(name.encode()).hexdigest()


class FdStoreClient:
    """A rank's connection to the descriptor store of its job. Starts the store if none runs.

    Args:
        job: The job.

    Raises:
        FdStoreLostError: If no store runs and none can be started.
    """

    def __init__(self, job: TorchrunJob) -> None:
        self._socket = self._connect(job)

    def put(self, name: str, fd: int) -> None:
        """Stores the descriptor of a memory file; replaces any descriptor that is stored under the name.

        Raises:
            FdStoreLostError: If the store has exited.
        """
        self._request({"put": name}, [fd])

    def get_all(self, prefix: str) -> dict[str, int]:
        """Returns the stored descriptors, by name.

        Args:
            prefix: Prefix of the names; the returned names do not contain it.

        Raises:
            FdStoreLostError: If the store has exited.
        """
        names, fds = self._request({"get_all": prefix}, [])
        return dict(zip(names, fds, strict=True))

    def _request(self, request: dict[str, str], fds: list[int]) -> tuple[list[str], list[int]]:
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
            reply, found, _, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES, _MAX_FILES)
        except OSError as error:
            raise FdStoreLostError(f"The process that stores commits does not respond: {error}") from error
        if not reply:
            raise FdStoreLostError(
                "The process that stores commits has exited, or has reached its limit of open files (`ulimit -n`)."
            )
        return json.loads(reply), list(found)

    @staticmethod
    def _connect(job: TorchrunJob) -> socket.socket:
        try:
            file = job.address_file
        except OSError as error:
            raise FdStoreLostError(
                f"There is no private directory for the file by which ranks find commits: {error}. Set"
                f" {user_cache.CACHE_VARIABLE} to a directory that only this user can write."
            ) from error
        process, deadline = None, time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            # Without blocking: a process of another user may have bound the address of an exited store.
            connection.setblocking(False)
            with suppress(OSError):
                address = file.read_bytes()
                if address:  # otherwise the store has not bound its socket yet
                    connection.connect(b"\0" + address)
                    if is_of_this_user(connection):
                        connection.setblocking(True)
                        return connection
            connection.close()
            if process is None:
                process = _start(job, file)
            time.sleep(_POLL_S)
        raise FdStoreLostError(f"The process that stores commits did not start within {START_TIMEOUT_S:g} s.")


def _directory() -> Path:
    """Returns a private directory in the user's cache, or in the temporary directory if the user has no home."""
    try:
        return user_cache.create(user_cache.directory("fd-stores"))
    except OSError:
        return user_cache.create(Path(tempfile.gettempdir(), f"lightning-strategies-ext-{os.geteuid()}", "fd-stores"))


def _start(job: TorchrunJob, file: Path) -> "subprocess.Popen[bytes]":
    # In a new session, because the agent kills the sessions of its ranks. It inherits no open files of this rank.
    command = python_module(__name__, str(file), str(job.agent_pid), repr(job.agent_start))
    devnull = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=devnull, stdout=devnull, stderr=devnull, cwd="/", start_new_session=True)


def _serve(path: str, agent_pid: int, agent_start: float) -> None:
    """Holds descriptors until the agent exits. Returns immediately if the job has another store.

    Args:
        path: Path of :attr:`TorchrunJob.address_file`.
        agent_pid: Process id of torchrun's agent.
        agent_start: Start time of the agent.
    """
    import fcntl  # not available on Windows, where this module can be imported

    with suppress(OSError), open(path, "a+b", opener=_open_private) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        agent_pidfd = None
        with suppress(OSError):  # seccomp may forbid it
            agent_pidfd = os.pidfd_open(agent_pid)
        if is_running(agent_pid, agent_start):
            address = b"lightning-strategies-ext-" + secrets.token_hex(16).encode()
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(b"\0" + address)
                listener.listen(128)
                file.truncate(0)
                file.write(address)
                file.flush()
                _serve_requests(listener, agent_pidfd, lambda: is_running(agent_pid, agent_start))
        os.unlink(path)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, mode=0o600)


def _serve_requests(listener: socket.socket, agent_pidfd: int | None, is_agent_running: Callable[[], bool]) -> None:
    """Stores and returns descriptors until the agent exits."""
    loop = SelectorLoop()
    stored: dict[str, int] = {}
    has_agent_exited = False

    def on_exit() -> bool:
        nonlocal has_agent_exited
        has_agent_exited = True
        return True

    def on_request(connection: socket.socket) -> bool:
        if not _handle_request(connection, stored):
            loop.remove(connection)
            connection.close()
        return False

    def on_connection() -> bool:
        try:
            connection, _ = listener.accept()
        except OSError:  # the peer has closed the connection, or this process has reached its limit of open files
            time.sleep(_POLL_S)
            return False
        if is_of_this_user(connection):
            loop.add(connection, partial(on_request, connection))
        else:
            connection.close()
        return False

    if agent_pidfd is not None:
        loop.add(agent_pidfd, on_exit)
    loop.add(listener, on_connection)
    while not has_agent_exited and (agent_pidfd is not None or is_agent_running()):
        loop.wait(_AGENT_POLL_S if agent_pidfd is None else math.inf)


def _handle_request(connection: socket.socket, stored: dict[str, int]) -> bool:
    """Processes a request of a rank; returns False if its connection is to be closed."""
    with suppress(OSError, ValueError):
        received, fds, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 1)
        if not received:
            return False
        request = json.loads(received)
        if "put" in request:
            if not fds:  # this process has reached its limit of open files
                return False
            old = stored.get(request["put"])
            (stored[request["put"]],) = fds
            if old is not None:
                os.close(old)
            connection.send(b"[]")
        else:
            prefix = request["get_all"]
            names = [name for name in stored if name.startswith(prefix)][:_MAX_FILES]
            reply = json.dumps([name.removeprefix(prefix) for name in names]).encode()
            socket.send_fds(connection, [reply], [stored[name] for name in names])
        return True
    return False


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
