"""Activity of a thread, sampled from another thread, and the status table of a host."""

import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest

from lightning_strategies_ext.failure.local_status import SLOT_NUM_BYTES, StatusTable
from lightning_strategies_ext.failure.thread_activity import ThreadActivity
from tests.support.ranks import LIMIT_S, run_script

on_linux = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="this system has no idle scheduling policy")


def sleep(begun: threading.Event, ended: threading.Event) -> None:
    begun.set()
    ended.wait()


def compute(begun: threading.Event, ended: threading.Event) -> None:
    begun.set()
    while not ended.is_set():
        sum(range(1000))


def compute_in_one_call(begun: threading.Event, ended: threading.Event) -> None:
    import numpy as np

    matrix = np.random.default_rng(0).random((400, 400))
    begun.set()
    while not ended.is_set():
        np.linalg.svd(matrix)


def get_no_core(begun: threading.Event, ended: threading.Event) -> None:
    # Another process occupies the only core that this thread may use, with a higher priority.
    core = min(os.sched_getaffinity(0))
    other = subprocess.Popen(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"],
        stdout=subprocess.PIPE,
    )
    other.stdout.readline()
    threading.Thread(target=lambda: [ended.wait(), other.kill(), other.wait(), other.stdout.close()]).start()
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    begun.set()
    while not ended.is_set():
        hashlib.pbkdf2_hmac("sha256", b"", b"", 30_000)


def read(begun: threading.Event, ended: threading.Event) -> None:
    # Reads from a pipe that receives data a hundred times per second.
    receiver, sender = os.pipe()

    def send() -> None:
        while not ended.is_set():
            os.write(sender, b".")
            time.sleep(0.005)
        os.close(sender)

    threading.Thread(target=send).start()
    begun.set()
    while os.read(receiver, 1):
        pass
    os.close(receiver)


def pdb_prompt(begun: threading.Event, ended: threading.Event) -> None:
    # The prompt of pdb reads a line of standard input, which arrives at the end of the test.
    import io
    import pdb

    class Waits(io.StringIO):
        def readline(self, *args):
            ended.wait()
            return "continue\n"

    begun.set()
    pdb.Pdb(stdin=Waits(), stdout=io.StringIO(), nosigint=True).set_trace()


def status_of(thread: threading.Thread) -> dict[str, str]:
    lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def does_nothing(thread: threading.Thread) -> Callable[[], bool]:
    return lambda: True


def uses_cpu(thread: threading.Thread) -> Callable[[], bool]:
    clock = time.pthread_getcpuclockid(thread.ident)
    before_s = time.clock_gettime(clock)
    return lambda: time.clock_gettime(clock) - before_s > 0.02


def wakes_up(thread: threading.Thread) -> Callable[[], bool]:
    before = int(status_of(thread)["voluntary_ctxt_switches"])
    return lambda: int(status_of(thread)["voluntary_ctxt_switches"]) - before > 10


def is_ready(thread: threading.Thread) -> Callable[[], bool]:
    return lambda: status_of(thread)["State"].startswith("R")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("doing", "activity_of", "is_still", "is_idle", "is_debugged"),
    [
        (sleep, does_nothing, True, True, False),
        (compute, uses_cpu, None, False, False),
        (compute_in_one_call, uses_cpu, None, False, False),
        pytest.param(get_no_core, is_ready, None, False, False, marks=on_linux),
        (read, wakes_up, None, False, False),
        (pdb_prompt, does_nothing, True, True, True),
    ],
)
def test_the_activity_of_a_thread_is_sampled_from_another_thread(doing, activity_of, is_still, is_idle, is_debugged):
    # The thread must be active between two samples, according to its clock and status: a busy machine may delay it.
    begun, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=doing, args=(begun, ended))
    thread.start()
    try:
        assert begun.wait(LIMIT_S)
        time.sleep(0.2)
        activity = ThreadActivity(thread)
        idle = []
        for _ in range(8):
            has_acted, deadline = activity_of(thread), time.monotonic() + LIMIT_S
            time.sleep(0.1)
            while not has_acted():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            activity.sample(0.25)  # simulates a longer interval, to shorten the test
            idle.append(activity.idle_s)
        assert (idle[-1] >= 1.5) == is_idle, idle
        if is_still is not None:
            assert (activity.unchanged_s >= 1.5) == is_still
        assert activity.is_in_debugger == is_debugged
        assert doing.__name__ in activity.stack()
        assert any(f"in {doing.__name__}" in frame for frame in activity.user_frames())
    finally:
        ended.set()
        thread.join()


class Store(dict):
    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self[key]


@pytest.mark.processes
@pytest.mark.parametrize("is_named", [False, True])
def test_a_status_can_be_read_after_the_exit_of_its_process(tmp_path, monkeypatch, is_named):
    if is_named:  # as on macOS
        monkeypatch.delattr(os, "memfd_create")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = Store()
    table = StatusTable.open_for_host(store, "path", 3, [3, 5])
    assert [table.read(slot) for slot in range(2)] == [None, None]

    def write() -> None:
        StatusTable.open_for_host(store, "path", 5, [3, 5]).write(b"the last word")
        os.kill(os.getpid(), 9)

    process = get_context("fork").Process(target=write)
    process.start()
    process.join()
    table.write(b"mine")
    assert [table.read(slot) for slot in range(2)] == [b"mine", b"the last word"]
    with pytest.raises(ValueError, match="do not fit"):
        table.write(b"." * SLOT_NUM_BYTES)
    assert len(list(tmp_path.iterdir())) == is_named
    table.close()
    assert not list(tmp_path.iterdir())


def test_a_reader_never_reads_a_partial_status():
    store = Store()
    reader, writer = (
        StatusTable.open_for_host(store, "path", 0, [0, 1]),
        StatusTable.open_for_host(store, "path", 1, [0, 1]),
    )
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            for letter in (b"a", b"b"):
                writer.write(letter * 20_000)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        while reader.read(1) is None:
            time.sleep(0.01)
        seen = [reader.read(1) for _ in range(2000)]
    finally:
        ended.set()
        thread.join()
    assert {content for content in seen if content} <= {b"a" * 20_000, b"b" * 20_000}
    assert any(seen)


def test_a_status_table_of_another_user_is_rejected(tmp_path, monkeypatch):
    store = Store()
    StatusTable.open_for_host(store, "path", 0, [0, 1])
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert StatusTable.open_for_host(store, "path", 1, [0, 1]) is None


def test_other_files_of_this_user_are_rejected_as_status_tables(tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"x" * 2 * SLOT_NUM_BYTES)
    memory = os.memfd_create("lightning_strategies_ext_status")  # which could be truncated
    os.ftruncate(memory, 2 * SLOT_NUM_BYTES)
    for path in (str(precious), f"/proc/{os.getpid()}/fd/{memory}"):
        store = Store()
        store.set("path", path)
        assert StatusTable.open_for_host(store, "path", 1, [0, 1]) is None
    os.close(memory)


def test_a_status_table_cannot_be_truncated():
    store = Store()
    table = StatusTable.open_for_host(store, "path", 0, [0, 1])
    assert table is not None
    with open(store.get("path").decode(), "r+b") as file, pytest.raises(PermissionError):
        file.truncate(0)
    table.close()


SAMPLED_SCRIPT = """
import gc
import threading
import time

from lightning_strategies_ext.failure.thread_activity import ThreadActivity

looked_at = threading.get_ident()


def let_it_go_on(phase, info):
    if threading.get_ident() != looked_at and phase == "start":
        time.sleep(0.001)


def descend(depth):
    return descend(depth - 1) if depth else 0


def look():
    while not has_ended.is_set():
        activity.sample(0.1)
        activity.stack()


gc.callbacks.append(let_it_go_on)
gc.set_threshold(5)
activity, has_ended = ThreadActivity(threading.current_thread()), threading.Event()
looks = threading.Thread(target=look)
looks.start()
end = time.monotonic() + 2
while time.monotonic() < end:
    descend(400)
has_ended.set()
looks.join()
print(gc.isenabled())
gc.disable()
activity.sample(0.1)
print(gc.isenabled())
"""


@pytest.mark.processes
def test_garbage_may_be_collected_while_a_thread_is_sampled(tmp_path):
    script = tmp_path / "looked_at.py"
    script.write_text(SAMPLED_SCRIPT)
    result = run_script(script)
    assert (result.returncode, result.stdout.split()) == (0, ["True", "False"]), result.stdout
