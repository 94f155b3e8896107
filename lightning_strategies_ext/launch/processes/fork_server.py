"""Fork server: a process that has imported torch and Lightning, and forks workers (``start_method="forkserver"``).

The first worker takes the time of the imports, each later one a few milliseconds. The server imports only modules of
this package and of Lightning, never the user's script: a script may start threads or use a GPU, and neither survives a
fork.
"""

import gc
import importlib
import multiprocessing
import os
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from lightning_strategies_ext._system import peers
from lightning_strategies_ext._system.interpreters import current_options, python_module

#: A request is a process ID, or 0. The reply is the exit code of this process, or the ID of a new process.
_NUMBER = struct.Struct("!i")
#: Reply if a process runs or is unknown.
_NO_EXIT_CODE = 1 << 16
_lock = threading.Lock()
_server: "ForkServer | None" = None


class ForkServer:
    """The fork server, as the main process controls it.

    Args:
        preloaded: Module that the server imports before it forks.
    """

    def __init__(self, preloaded: str) -> None:
        parent_end, child_end = socket.socketpair()
        self._socket = parent_end
        with child_end:
            arguments = str(child_end.fileno()), str(os.getpid()), preloaded
            command = python_module(__name__, *arguments, options=current_options())
            self._pid = os.getpid()
            # In a new session: Ctrl-C in a terminal reaches only the main process, which signals the workers.
            self.process = subprocess.Popen(command, pass_fds=[child_end.fileno()], start_new_session=True)

    def fork(self, worker: socket.socket) -> int:
        """Forks a worker with the given end of its channel, and returns its process ID.

        Raises:
            RuntimeError: If the server has exited.
        """
        # With the current output streams; those of the server may be older.
        pid = self._request(0, [worker.fileno(), 1, 2])
        if pid is None:
            raise RuntimeError(
                f"The fork server, which starts the workers, exited with exit code {self.process.wait()}. Check its"
                " output above, or use `start_method='spawn'`, which needs no fork server."
            )
        return pid

    def exit_code(self, pid: int) -> int | None:
        """Returns the exit code of a worker, negative for a signal; None if it runs or is unknown."""
        code = self._request(pid, [])
        return None if code == _NO_EXIT_CODE else code

    def _request(self, number: int, fds: list[int]) -> int | None:
        """Sends a request and returns the reply, or None if the server has exited."""
        try:
            with suppress(OSError):
                socket.send_fds(self._socket, [_NUMBER.pack(number)], fds)
                reply = self._socket.recv(_NUMBER.size, socket.MSG_WAITALL)
                return int(_NUMBER.unpack(reply)[0]) if len(reply) == _NUMBER.size else None
        except BaseException:  # interrupted: the next request would receive the reply
            self.process.kill()
            self.process.wait()
            raise
        return None

    @property
    def is_usable(self) -> bool:
        """Whether the server runs and was started by this process, not inherited in a fork."""
        return self._pid == os.getpid() and self.process.poll() is None

    def close(self) -> None:
        """Shuts the server down. Its workers continue."""
        self._socket.close()
        if self._pid == os.getpid():
            self.process.wait()


def get(preloaded: str) -> ForkServer:
    """Returns the server of this process. Starts it if necessary, with a module that it imports before it forks."""
    global _server
    with _lock:
        if _server is None or not _server.is_usable:
            _server = ForkServer(preloaded)
        return _server


def close() -> None:
    """Shuts down the server of this process, if it has one."""
    global _server
    with _lock:
        if _server is not None:
            _server.close()
            _server = None


def _run(requests: socket.socket, main_pid: int, preloaded: str) -> None:
    gc.disable()  # collections would scan the imported objects repeatedly: a sixth of the time
    for module in ("torchmetrics", preloaded):
        importlib.import_module(module)
    gc.freeze()  # so that no collection in a worker writes to shared pages
    from lightning_strategies_ext.launch.processes import worker_main

    context = multiprocessing.get_context("fork")
    children: dict[int, BaseProcess] = {}
    started = peers.start_time(main_pid)
    # Polls the main process instead of monitoring it in a thread, because threads do not survive a fork.
    while peers.is_running(main_pid, started):
        running = [child.sentinel for child in children.values() if child.exitcode is None]
        wait([requests, *running], worker_main.PARENT_POLL_S)
        with suppress(BlockingIOError):
            request, fds, _, _ = socket.recv_fds(requests, _NUMBER.size, 3, socket.MSG_DONTWAIT)
            if not request:
                break
            (pid,) = _NUMBER.unpack(request)
            if pid == 0:
                child = context.Process(target=_run_worker, args=(requests, fds, main_pid))
                child.start()
                for fd in fds:
                    os.close(fd)
                assert child.pid is not None
                children[child.pid] = child
                reply = child.pid
            else:
                exited = children.get(pid)
                if exited is not None:
                    exited.join(timeout=1)
                reply = _NO_EXIT_CODE if exited is None or exited.exitcode is None else exited.exitcode
            requests.sendall(_NUMBER.pack(reply))
    os._exit(0)  # at once: no part needs the interpreter's shutdown, and the main process waits


def _run_worker(requests: socket.socket, fds: list[int], main_pid: int) -> None:
    from lightning_strategies_ext.launch.processes import worker_main

    requests.close()
    connected, *outputs = fds
    for fd, number in zip(outputs, (1, 2), strict=True):
        os.dup2(fd, number)
        os.close(fd)
    worker_main.serve_in_fork(socket.socket(fileno=connected), main_pid)


if __name__ == "__main__":
    _run(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
