"""The keeper: a process that holds memory for ranks that are ended and started anew, one for each job on a host.

torchrun's agent answers a failure by ending all ranks of its host and starting them again. What they are to find again
is in memory files without a name, of which the keeper holds the descriptors: a rank gives it some under a name, and a
rank that comes later asks for them. No commit goes through the keeper; ranks write to the memory by themselves.

The first rank starts it. It ends with the agent, however that ends, and with it goes the memory: nothing is left that
would have to be cleaned. Who talks to it, and it to whom, must be the same user. Linux only.
"""

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

import psutil

from lightning_strategies_ext.interpreters import python_module
from lightning_strategies_ext.peers import is_of_this_user

#: What torchrun says to its ranks about the job.
RUN_ID = "TORCHELASTIC_RUN_ID"
#: How long a keeper may take to start, in seconds.
START_S = 60.0
_POLL_S = 0.02
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
        """
        run_id = os.environ.get(RUN_ID)
        if run_id is None:
            return None
        for ancestor in psutil.Process().parents():
            with suppress(psutil.Error):  # one of another user, or that has ended
                if ancestor.environ().get(RUN_ID) == run_id:
                    continue
            return cls(run_id, ancestor.pid, ancestor.create_time())
        return None

    @property
    def address(self) -> str:
        """Of the keeper's socket, which has no file."""
        return f"\0lightning_strategies_ext/keeper/{os.getuid()}/{self.agent}/{self.agent_start}/{self.run_id}"[:107]


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
        process, deadline = None, time.monotonic() + START_S
        while time.monotonic() < deadline:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(job.address)
            except OSError:
                connection.close()
                if process is None:
                    process = _start(job)
                time.sleep(_POLL_S)
                continue
            if is_of_this_user(connection):
                return connection
            connection.close()
            raise KeeperLostError(f"Another user's process has taken the address {job.address!r}.")
        raise KeeperLostError(f"No process to keep commits has started within {START_S:g} s.")


def _start(job: Job) -> "subprocess.Popen[bytes]":
    # In a session of its own: the agent kills those of the ranks. And with no open files of theirs.
    command = python_module(__name__, job.run_id, str(job.agent), repr(job.agent_start))
    nothing = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, cwd="/", start_new_session=True)


def _serve(job: Job) -> None:
    """Holds memory until the agent ends. Returns at once if another keeper of the job is there."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        agent = os.pidfd_open(job.agent)
        if psutil.Process(job.agent).create_time() != job.agent_start:
            return
        listener.bind(job.address)
    except (OSError, psutil.NoSuchProcess):
        return
    listener.listen(128)
    selector = selectors.DefaultSelector()
    selector.register(agent, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    kept: dict[str, int] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj == agent:
                return
            if key.fileobj is listener:
                connection, _ = listener.accept()
                if is_of_this_user(connection):
                    selector.register(connection, selectors.EVENT_READ)
                else:
                    connection.close()
                continue
            assert isinstance(key.fileobj, socket.socket)
            if not _answer(key.fileobj, kept):
                selector.unregister(key.fileobj)
                key.fileobj.close()


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
    _serve(Job(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
