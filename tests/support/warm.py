"""Programs of tests that would import for seconds are forked from a server that has imported all; see :func:`python`.

Launchers such as ``horovodrun`` start them as they start any program: what they start is a small program in the place
of the interpreter, which has the server fork one with its arguments, environment, directory, open files and namespaces,
of which tests make hosts. It passes on the signals that it gets, ends as the forked one ends, and takes that with it
when it is killed. The forked one does what is to be done at the interpreter's end, but frees nothing. What such a
program starts by ``sys.executable``, as torchrun does, is forked from the server too, and is no child of it then; with
:func:`children` in the environment it is started as ever. The large packages of which :mod:`.lean` knows are imported
by those that use them: with them in the server, each fork would take half as long again.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import marshal
import os
import random
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from tests.support import lean

_CHILDREN = "TESTS_CHILDREN"
_SERVER = "TESTS_WARM_SERVER"
_IMPORTS = (
    *("lightning.pytorch", "torchmetrics", "horovod.torch", "horovod.torch.elastic"),
    *("lightning_strategies_ext.pytorch.ddp_spawn", "lightning_strategies_ext.pytorch.dp"),
    *("lightning_strategies_ext.pytorch.horovod_elastic", "lightning_strategies_ext.fabric.ddp"),
    "lightning_strategies_ext.horovod.collectives",
)
_NAMESPACES = ("net", "uts", "mnt")
_MOST_FILES = 64
_PR_SET_PDEATHSIG = 1
_REPOSITORY = Path(__file__).parents[2]

# What it imports is a part of the interpreter: modules in Python would take two thirds of its time.
_STAND_IN = """\
#!{python} -IS
import _signal, _socket, _struct, marshal, posix, sys

files = []
for number in map(int, posix.listdir("/proc/self/fd")):
    try:
        files += [number] * posix.get_inheritable(number)
    except OSError:
        pass  # that of the directory
namespaces = [posix.open(f"/proc/self/ns/{{name}}", posix.O_RDONLY | posix.O_CLOEXEC) for name in {namespaces!r}]
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
server.connect({address!r})
said = marshal.dumps([sys.argv[1:], posix.environ, posix.getcwd(), files])
sent = _struct.pack(f"{{len(files + namespaces)}}i", *files, *namespaces)
server.sendmsg([_struct.pack("I", len(said))], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, sent)])
server.sendall(said)


def pass_on(number, frame):
    try:
        server.send(bytes([number]))
    except OSError:
        pass  # the forked one has ended, and how is about to be read


for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGUSR1, _signal.SIGUSR2):
    if _signal.getsignal(number) != _signal.SIG_IGN:
        _signal.signal(number, pass_on)
ended = server.recv(4)  # nothing when the server has ended, and killed what it had forked
(code,) = _struct.unpack("i", ended) if ended else [-_signal.SIGKILL]
if code < 0:
    if code != -_signal.SIGKILL:
        _signal.signal(-code, _signal.SIG_DFL)
    posix.kill(posix.getpid(), -code)
posix._exit(code)
"""


@dataclass
class Program:
    """What an interpreter is asked to run."""

    arguments: list[str]
    environment: dict[str, str]
    directory: str
    files: list[int]

    def run(self) -> None:
        """Runs it in this process, which has been forked for it."""
        while (option := self.arguments[0]) in ("-u", "-B"):
            del self.arguments[0]
            if option == "-u":  # output is not buffered, as torchrun wants it
                sys.stdout.reconfigure(write_through=True)
        how, *rest = self.arguments
        first = os.path.dirname(os.path.abspath(how)) if how not in ("-m", "-c") else self.directory
        sys.path[:0] = [first, *filter(None, self.environment.get("PYTHONPATH", "").split(os.pathsep))]
        if how == "-c":
            sys.argv = ["-c", *rest[1:]]
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        elif how == "-m":
            sys.argv = rest
            sys.modules.pop(rest[0], None)
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = self.arguments
            runpy.run_path(how, run_name="__main__")


def start_server() -> subprocess.Popen[bytes] | None:
    """Starts the server; programs that come before it is ready wait for it.

    Returns:
        The server, which ends when nobody holds this any more. None where the system has no such processes.
    """
    if sys.platform != "linux":
        return None
    directory = tempfile.mkdtemp(prefix="tests-")
    address, stand_in = f"{directory}/server", Path(directory, "python")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    stand_in.write_text(_STAND_IN.format(python=sys.executable, address=address, namespaces=_NAMESPACES))
    stand_in.chmod(0o700)
    for program in Path(sys.executable).parent.glob("horovodrun"):  # which is looked for beside the interpreter
        Path(directory, program.name).symlink_to(program)
    os.environ[_SERVER] = str(stand_in)
    os.environ["PET_LOG_DIR"] = directory  # of torchrun, which makes one for each of its runs and leaves it there
    interpreter = marshal.dumps([sys.executable, sys.prefix, lean.sites()]).hex()
    command = [lean.python(), "-m", __name__, directory, str(listener.fileno()), interpreter]
    environment = {**os.environ, "PYTHONPATH": str(_REPOSITORY)}
    server = subprocess.Popen(
        command,
        cwd=_REPOSITORY,
        env=environment,
        stdin=subprocess.PIPE,
        pass_fds=[listener.fileno()],
        start_new_session=True,
    )
    listener.close()
    return server


def python() -> str:
    """What to call in the place of ``sys.executable`` to run a program that need not import what all programs do."""
    return os.environ.get(_SERVER, sys.executable)


def children(interpreter: str | None = None) -> dict[str, str]:
    """For programs that start some which ask whose child they are, as ranks of ``horovod_ext`` do.

    Args:
        interpreter: Of what they start; that of :mod:`.lean` if None.
    """
    return {_CHILDREN: interpreter or str(lean.python())}


def worker_of_pytest() -> str:
    """The same for a process that runs tests, which :func:`become_worker_of_pytest` then is to make one."""
    return shlex.join(["env", *(f"{name}={value}" for name, value in children(sys.executable).items()), python()])


def become_worker_of_pytest() -> None:
    """What this process starts is like what any other one does: it has only been forked, if at all, from the server."""
    os.environ.pop(_CHILDREN, None)


@contextmanager
def spawned_processes() -> Iterator[None]:
    """In it, interpreters that this process starts to start others or to work for it, ours and multiprocessing's, are
    forked from the server, too."""
    executables = sys.executable, spawn.get_executable()
    os.environ.update(children(sys.executable))
    sys.executable = python()
    spawn.set_executable(python())
    try:
        yield
    finally:
        sys.executable = executables[0]
        spawn.set_executable(executables[1])
        del os.environ[_CHILDREN]


def launcher(command: list[str]) -> list[str]:
    """A launcher's command, of which ``horovodrun`` runs here, too: it imports torch to ask what Horovod can do.

    It is no file then, which its helpers, one for each rank, would run again.
    """
    if command and Path(command[0]).name == "horovodrun":
        return [python(), "-c", "from horovod.runner.launch import run_commandline; run_commandline()", *command[1:]]
    return command


def _serve(listener: socket.socket, directory: str) -> Program:
    """Forks programs until the standard input ends. Returns in each of them."""
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ, partial(_leave, directory))
    selector.register(listener, selectors.EVENT_READ, None)
    while True:
        for key, _ in selector.select():
            if selector.get_map().get(key.fd) != key:
                continue  # it has ended with another one
            if key.data is not None:
                key.data()
                continue
            connection, _ = listener.accept()
            try:
                program, fds = _receive(connection)
            except ConnectionError:
                connection.close()
                continue
            pid = os.fork()
            if pid == 0:
                for other in [connection, *(other.fileobj for other in selector.get_map().values())]:
                    if isinstance(other, socket.socket):
                        other.close()
                    elif other != sys.stdin.fileno():
                        os.close(other)
                selector.close()
                _become(program, fds)
                return program
            for fd in fds:
                os.close(fd)
            _watch(selector, connection, pid)


def _receive(connection: socket.socket) -> tuple[Program, list[int]]:
    length, fds, _, _ = socket.recv_fds(connection, 4, _MOST_FILES)
    said = b""
    while len(said) < struct.unpack("I", length)[0]:
        part = connection.recv(1 << 20)
        if not part:
            raise ConnectionError("The program has ended before it has said what to run.")
        said += part
    arguments, environment, work_dir, files = marshal.loads(said)
    environment = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
    return Program(arguments, environment, work_dir, files), fds


def _watch(selector: selectors.BaseSelector, connection: socket.socket, pid: int) -> None:
    """Passes on signals to a program until it ends, and then how it has ended."""
    ended = os.pidfd_open(pid)

    def on_signal() -> None:
        number = b""
        with suppress(ConnectionResetError):
            number = connection.recv(1)
        if not number:
            selector.unregister(connection)
        os.kill(pid, number[0] if number else signal.SIGKILL)

    def on_end() -> None:
        _, status = os.waitpid(pid, 0)
        with suppress(BrokenPipeError):
            connection.send(struct.pack("i", os.waitstatus_to_exitcode(status)))
        with suppress(KeyError):
            selector.unregister(connection)
        selector.unregister(ended)
        os.close(ended)
        connection.close()

    selector.register(ended, selectors.EVENT_READ, on_end)
    selector.register(connection, selectors.EVENT_READ, on_signal)


def _become(program: Program, fds: list[int]) -> None:
    import numpy as np
    import torch
    from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only

    libc = ctypes.CDLL(None, use_errno=True)
    os.setsid()
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for name, namespace in zip(_NAMESPACES, fds[len(program.files) :], strict=True):
        is_other = not os.path.samestat(os.fstat(namespace), os.stat(f"/proc/self/ns/{name}"))
        if is_other and libc.setns(namespace, 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the program's namespace {name}")
        os.close(namespace)
    # Out of the way of each other first: any may have the number that another one is to have.
    apart = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 1 + max(fds + program.files)) for fd in fds[: len(program.files)]]
    for fd in fds[: len(program.files)]:
        os.close(fd)
    for number, fd in zip(program.files, apart, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(program.directory)
    os.environ.clear()
    os.environ.update(program.environment)
    sys.executable = os.environ.get(_CHILDREN, python())
    # What is decided when it is imported.
    random.seed()
    np.random.seed()
    rank_zero_only.rank = _get_rank() or 0
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _leave(directory: str) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def main() -> None:
    """Runs the server, and each of the programs that it forks."""
    directory, listener = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    for name in _IMPORTS:
        with suppress(ImportError):  # there may be no Horovod
            importlib.import_module(name)
    _become_interpreter(*marshal.loads(bytes.fromhex(sys.argv[3])))
    gc.freeze()
    _end(_run(_serve(listener, directory)))


def _become_interpreter(executable: str, prefix: str, sites: list[str]) -> None:
    """Programs find all that is installed where the server was started, and not only what the server has imported."""
    own = lean.sites()
    sys.path[:] = [path for path in sys.path if path not in own] + sites
    sys.prefix = sys.exec_prefix = prefix
    sys.executable = executable
    spawn.set_executable(executable)


def _run(program: Program) -> int:
    """Runs it, and returns how the interpreter would end: the exit code, or the negative number of a signal."""
    try:
        program.run()
    except SystemExit as exit:
        if exit.code is None or isinstance(exit.code, int):
            return (exit.code or 0) & 0xFF
        print(exit.code, file=sys.stderr)
        return 1
    except BaseException as exception:
        sys.excepthook(type(exception), exception, exception.__traceback__)
        return -signal.SIGINT if isinstance(exception, KeyboardInterrupt) else 1
    return 0


def _end(code: int) -> NoReturn:
    """Ends the process as the interpreter does, but for freeing what there is: a third of a second, to copy memory that
    is shared with the server. MPI's end is a part of the interpreter's, and what has started its ranks waits for it."""
    if "mpi4py.MPI" in sys.modules and code >= 0:
        sys.exit(code)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
