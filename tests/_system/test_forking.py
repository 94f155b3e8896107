"""Forked processes do not hang if a library's threads attach to and detach from Python, also before CPython 3.12."""

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_strategies_ext.shm import compiler

pytestmark = pytest.mark.processes

#: Each thread repeatedly attaches to Python and detaches from it, like a thread that releases a tensor.
THREADS = """
#include <pthread.h>

static int (*ensure)(void);
static void (*release)(int);

static void *come_and_go(void *unused)
{
    for (;;)
        release(ensure());
}

void start(void *its_ensure, void *its_release, int num_threads)
{
    ensure = (int (*)(void))its_ensure;
    release = (void (*)(int))its_release;
    for (pthread_t thread; num_threads > 0; num_threads--)
        pthread_create(&thread, 0, come_and_go, 0);
}
"""
PROGRAM = """
import ctypes, os, sys, time
from lightning_strategies_ext._system.forking import make_fork_safe

library, is_safe, timeout_s = sys.argv[1], sys.argv[2] == "safe", float(sys.argv[3])
if is_safe:
    assert make_fork_safe() and make_fork_safe()
python = ctypes.pythonapi
ensure, release = (ctypes.cast(f, ctypes.c_void_p) for f in (python.PyGILState_Ensure, python.PyGILState_Release))
ctypes.PyDLL(library).start(ensure, release, 3)
for number in range(500):
    pid, deadline = os.fork(), time.monotonic() + timeout_s
    if pid == 0:
        os._exit(0)
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            os.write(1, b"hangs")
            os._exit(0)
        time.sleep(0.0005)
os.write(1, b"all have run")
os._exit(0)
"""


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("threads")
    (directory / "threads.c").write_text(THREADS)
    library = directory / "threads.so"
    subprocess.run(
        [*compiler.command(), "-shared", "-fPIC", "-pthread", "-o", library, directory / "threads.c"], check=True
    )
    return library


def fork(threads: Path, how: str, timeout_s: float) -> str:
    command = [sys.executable, "-c", PROGRAM, str(threads), how, str(timeout_s)]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=250).stdout


def test_no_child_hangs(threads: Path) -> None:
    assert fork(threads, "safe", 60) == "all have run"


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="CPython 3.12 does it by itself")
def test_a_child_hangs_without_the_lock(threads: Path) -> None:
    assert fork(threads, "unsafe", 3) == "hangs"
