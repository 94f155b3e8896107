"""``examples/horovod_digits.py`` trains under ``horovodrun``, and continues without a killed rank."""

import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.horovod_commands import FIRST, SECOND, start_of
from tests.support.examples import EXAMPLE_ENVIRONMENT, EXAMPLES, LIMIT_S, number, rows
from tests.support.ranks import LONG_CYCLE, kill_tree, run_command, start_command

pytestmark = pytest.mark.processes

SCRIPT = EXAMPLES / "horovod_digits.py"
ACCURACY = "accuracy on 360 held-out images"
ENVIRONMENT = {**EXAMPLE_ENVIRONMENT, **LONG_CYCLE, "OMP_NUM_THREADS": "1"}


def test_two_ranks_of_horovodrun() -> None:
    command = [*start_of("horovodrun", 2), sys.executable, SCRIPT, "--epochs", "4"]
    result = run_command(*command, env=ENVIRONMENT, timeout_s=LIMIT_S)
    assert result.returncode == 0, result.stdout
    assert rows(result.stdout)["ranks in the course of training"] == ["2"]
    assert number(result.stdout, ACCURACY) > 0.9


def test_one_rank_continues_when_the_other_rank_is_killed(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text(f"{FIRST}:1\n{SECOND}:1\n")
    output, code = run_and_kill_rank_1({**ENVIRONMENT, "TRAINING_HOSTS": str(hosts)})
    assert code == 0, output
    assert rows(output)["ranks in the course of training"] == ["2, 1"]
    assert "2 -> 1 ranks" in output
    assert number(output, ACCURACY) > 0.95


def run_and_kill_rank_1(environment: dict[str, str]) -> tuple[str, int]:
    """Returns the output and the exit code of the example; kills rank 1 as soon as it has printed its process ID."""
    job = start_command(
        *(*start_of("horovodrun", 2), "--min-np", "1", "--max-np", "4"),
        *("--host-discovery-script", EXAMPLES / "horovod_hosts.sh"),
        *(sys.executable, SCRIPT, "--elastic", "--epochs", "24"),
        env=environment,
    )
    limit = threading.Timer(LIMIT_S, kill_tree, [job.pid])
    limit.start()
    lines = []
    try:
        for line in job.stdout:
            lines.append(line)
            if match := re.search(r"rank 1 of 2 is process (\d+)", line):
                os.kill(int(match[1]), signal.SIGKILL)
        return "".join(lines), job.wait()
    finally:
        limit.cancel()
        kill_tree(job.pid)
