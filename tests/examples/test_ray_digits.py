"""``examples/ray_digits.py``: Ray starts with the script, and exits with it in all cases."""

import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.examples import EXAMPLE_ENVIRONMENT, EXAMPLES, number
from tests.support.ranks import kill_tree, start_script
from tests.support.ray_clusters import FOREVER_S, PROGRAM_S, needs_ray

pytestmark = [pytest.mark.processes, needs_ray, pytest.mark.timeout(FOREVER_S)]
SCRIPT = EXAMPLES / "ray_digits.py"
ENVIRONMENT = {**EXAMPLE_ENVIRONMENT, "OMP_NUM_THREADS": "1"}
EXIT_TIMEOUT_S = 60
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::DashboardAg", "ray::RuntimeEnv")


@pytest.fixture
def directory() -> Iterator[str]:
    """Provides a directory for Ray's files, which remain after a SIGKILL; pytest's paths are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as directory:
        yield directory


@pytest.mark.parametrize("ending", ["by itself", "by SIGKILL"])
def test_the_example_trains_and_its_processes_exit_with_it(ending, directory):
    """Checks that workers and Ray exit with the program, and that Ray listens on local addresses only."""
    epochs = "3" if ending == "by itself" else "10000"
    job = start_script(SCRIPT, "--cpus", "0.5", "--epochs", epochs, env={**ENVIRONMENT, "TMPDIR": directory})
    limit = threading.Timer(PROGRAM_S, kill_tree, [job.pid])
    limit.start()
    lines, started, listening = [], [], set()
    try:
        for line in job.stdout:
            lines.append(line)
            if len(re.findall(r"rank \d of 2 is process", "".join(lines))) == 2 and not started:
                started = psutil.Process(job.pid).children(recursive=True)
                listening = listened_at([psutil.Process(job.pid), *started])
                if ending == "by SIGKILL":
                    os.kill(job.pid, signal.SIGKILL)
        code = job.wait()
    finally:
        limit.cancel()
        kill_tree(job.pid)
    output = "".join(lines)
    assert len(started) > 4, output
    assert listening == {"127.0.0.1"}
    assert_exited(started)
    if ending == "by itself":
        assert code == 0, output
        assert not list(Path(directory).glob("ray-*"))
        assert number(output, "workers") == 2
        assert number(output, "accuracy on 360 held-out images") > 0.8
        right = number(output, "correct predictions")
        assert right == pytest.approx(360 * number(output, "accuracy on 360 held-out images"), abs=0.5)
    else:
        assert code == -signal.SIGKILL


def listened_at(processes: list[psutil.Process]) -> set[str]:
    """Returns the addresses at which Ray's processes listen, without workers: their process group has listeners."""
    found = set()
    for process in processes:
        try:
            if "WorkerActor" in "".join(process.cmdline()):
                continue
            connections = process.net_connections()
        except psutil.NoSuchProcess:
            continue
        found |= {one.laddr.ip.removeprefix("::ffff:") for one in connections if one.status == psutil.CONN_LISTEN}
    return found


def assert_exited(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while remaining := [process for process in processes if runs(process)]:
        assert time.monotonic() < deadline, remaining
        time.sleep(0.1)


def runs(process: psutil.Process) -> bool:
    """Returns whether a process remains. Ray's agents are excluded: they exit a minute after a SIGKILL of Ray."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.name() not in AGENTS
    except psutil.NoSuchProcess:
        return False
