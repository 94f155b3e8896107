"""The keeper: a process that holds memory for ranks that are ended and started anew, one for each job on a host.

torchrun's agent answers a failure by ending all ranks of its host and starting them again. What they are to find again
is in memory files without a name, of which the keeper holds the descriptors: a rank gives it some under a name, and a
rank that comes later asks for them. No commit goes through the keeper; ranks write to the memory by themselves.

The first rank starts it. It ends with the agent, however that ends, and with it goes the memory: nothing is left that
would have to be cleaned. Its socket has a random address, which a file in the user's cache names: other users cannot
take it first. Both ends of a connection compare users. Linux only.
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

#: What torchrun says to its ranks about the job.
RUN_ID = "TORCHELASTIC_RUN_ID"
#: How long a keeper may take to start, in seconds.
START_S = 60.0
_POLL_S = 0.02
#: How often the keeper checks whether the agent runs where the system has no descriptors of processes, in seconds.
_AGENT_POLL_S = 1.0
_MESSAGE_BYTES = 1 << 16
_MOST_FILES = 250  # Linux sends 253 at most


class KeeperLostError(RuntimeError):
    """The keeper does not answer any more."""


@dataclass(frozen=True)
class Job:
    """A job on this host.

    Attributes:
        run_id: As torchrun has it.
        agent: Process id of torchrun's agent here.
        agent_start: Tells it from a later process with the same number.
    """

    run_id: str
    agent: int
    agent_start: float

    @classmethod
    def of_this_process(cls) -> "Job | None":
        """The job that this process is a rank of; None if torchrun has not started it.

        The agent is the nearest ancestor that does not know of the job: between it and a rank there may be a shell.
        Where /proc is missing or hides the ancestors, it is the parent.
        """
        run_id = os.environ.get(RUN_ID)
        if run_id is None:
            return None
        agent = os.getppid()
        with suppress(psutil.Error, OSError):
            ancestors = psutil.Process().parents()
            for ancestor in ancestors:
                agent = ancestor.pid
                with suppress(psutil.Error):  # one of another user, or that has ended
                    if ancestor.environ().get(RUN_ID) == run_id:
                        continue
                break
            else:
                if ancestors:
                    return None
        return cls(run_id, agent, start_time(agent)) if agent else None  # 0: outside of the container

    @property
    def file(self) -> Path:
        """Path of the file with the address of the keeper's socket. The keeper locks the file while it runs.

        Raises:
            OSError: If the user has no directory to which only the user can write.
        """
        name = json.dumps([host_identity(), self.agent, self.agent_start, self.run_id])
        return _directory() / hashlib.sha256(name.encode()).hexdigest()


class Keeper:
    """A rank's connection to the keeper of its job; starts that if there is none yet.

    Args:
        job: The job.

    Raises:
        KeeperLostError: If there is none, and none can be started.
    """

    def __init__(self, job: Job) -> None:
        self._socket = self._connect(job)

    def keep(self, name: str, fd: int) -> None:
        """Lets the keeper hold a memory file, in the place of what it held under the name.

        Raises:
            KeeperLostError: If it is gone.
        """
        self._ask({"keep": name}, [fd])

    def find(self, prefix: str) -> dict[str, int]:
        """Descriptors of what it holds, by name.

        Args:
            prefix: What the names begin with; it is taken off.

        Raises:
            KeeperLostError: If it is gone.
        """
        names, fds = self._ask({"find": prefix}, [])
        return dict(zip(names, fds, strict=True))

    def _ask(self, request: dict[str, str], fds: list[int]) -> tuple[list[str], list[int]]:
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
            answer, found, _, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES, _MOST_FILES)
        except OSError as error:
            raise KeeperLostError(f"The process that keeps commits does not answer: {error}") from error
        if not answer:
            raise KeeperLostError("The process that keeps commits has ended.")
        return json.loads(answer), list(found)

    @staticmethod
    def _connect(job: Job) -> socket.socket:
        try:
            file = job.file
        except OSError as error:
            raise KeeperLostError(
                f"There is no private directory for the file by which ranks find commits: {error}. Set"
                f" {user_cache.CACHE_VARIABLE} to a directory to which only this user can write."
            ) from error
        process, deadline = None, time.monotonic() + START_S
        while time.monotonic() < deadline:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.setblocking(False)  # another process may listen at the address of a lost keeper
            with suppress(OSError):
                connection.connect(b"\0" + (file.read_bytes() or b"no keeper yet"))
                if is_of_this_user(connection):
                    connection.setblocking(True)
                    return connection
            connection.close()
            if process is None:
                process = _start(job, file)
            time.sleep(_POLL_S)
        raise KeeperLostError(f"No process to keep commits has started within {START_S:g} s.")


def _directory() -> Path:
    """Returns a private directory in the user's cache, or among the temporary ones if the user has no home."""
    try:
        return user_cache.create(user_cache.directory("keepers"))
    except OSError:
        return user_cache.create(Path(tempfile.gettempdir(), f"lightning-strategies-ext-{os.geteuid()}", "keepers"))


def _start(job: Job, file: Path) -> "subprocess.Popen[bytes]":
    # In a session of its own: the agent kills those of the ranks. And with no open files of theirs.
    command = python_module(__name__, str(file), str(job.agent), repr(job.agent_start))
    nothing = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, cwd="/", start_new_session=True)


def _serve(path: str, agent_pid: int, agent_start: float) -> None:
    """Holds memory until the agent ends. Returns at once if another keeper of the job runs.

    Args:
        path: Path of :attr:`Job.file`.
        agent_pid: Process id of torchrun's agent.
        agent_start: Start time of the agent.
    """
    import fcntl  # not on Windows, where this module can be imported

    with suppress(OSError), open(path, "a+b", opener=_for_this_user) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        agent = None
        with suppress(OSError):  # seccomp may forbid it
            agent = os.pidfd_open(agent_pid)
        if is_running(agent_pid, agent_start):
            address = b"lightning-strategies-ext-" + secrets.token_hex(16).encode()
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(b"\0" + address)
                listener.listen(128)
                file.truncate(0)
                file.write(address)
                file.flush()
                _hold(listener, agent, lambda: is_running(agent_pid, agent_start))
        os.unlink(path)


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, mode=0o600)


def _hold(listener: socket.socket, agent: int | None, is_agent_running: Callable[[], bool]) -> None:
    loop = SelectorLoop()
    kept: dict[str, int] = {}
    has_agent_exited = False

    def on_exit() -> bool:
        nonlocal has_agent_exited
        has_agent_exited = True
        return True

    def on_request(connection: socket.socket) -> bool:
        if not _answer(connection, kept):
            loop.remove(connection)
            connection.close()
        return False

    def on_connection() -> bool:
        connection, _ = listener.accept()
        if is_of_this_user(connection):
            loop.add(connection, partial(on_request, connection))
        else:
            connection.close()
        return False

    if agent is not None:
        loop.add(agent, on_exit)
    loop.add(listener, on_connection)
    while not has_agent_exited and (agent is not None or is_agent_running()):
        loop.wait(_AGENT_POLL_S if agent is None else math.inf)


def _answer(connection: socket.socket, kept: dict[str, int]) -> bool:
    """Does what a rank asks for; False if that has gone."""
    with suppress(OSError):
        said, fds, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 1)
        if not said:
            return False
        request = json.loads(said)
        if "keep" in request:
            old = kept.pop(request["keep"], None)
            if old is not None:
                os.close(old)
            (kept[request["keep"]],) = fds
            connection.send(b"[]")
        else:
            prefix = request["find"]
            names = [name for name in kept if name.startswith(prefix)][:_MOST_FILES]
            answer = json.dumps([name.removeprefix(prefix) for name in names]).encode()
            socket.send_fds(connection, [answer], [kept[name] for name in names])
        return True
    return False


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
