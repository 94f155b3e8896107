"""Failures before the startup barrier: no rank waits for a failed rank indefinitely."""

import os
import re
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.ranks import kill_tree, run_script, start_script

pytestmark = pytest.mark.processes

PORT_IS_TAKEN = """
import os
import socket
import sys
from pathlib import Path

Path(sys.argv[1], str(os.getpid())).touch()

from tests.support.models import MLP, loader, make_trainer

if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        taken = socket.create_server(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
    make_trainer("ddp_ext", devices=3, num_nodes=2).fit(MLP(), loader())
"""
LAST_LINE = PORT_IS_TAKEN.splitlines()[-1]

THEN_CONTINUES = """
if __name__ == "__main__":
    import time

    try:
        make_trainer("ddp_ext", devices=3, num_nodes=2).fit(MLP(), loader())
    except Exception as error:
        assert "LOCAL_RANK" in os.environ
        time.sleep(2)
        print("continues after", type(error).__name__)
"""


def test_a_script_that_catches_the_failure_continues_without_the_other_ranks(tmp_path):
    script, pids = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(PORT_IS_TAKEN.replace(LAST_LINE, "") + THEN_CONTINUES)
    pids.mkdir()
    process = start_script(script, pids)
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        remaining = [pid for pid in map(int, os.listdir(pids)) if runs(pid, script)]
        for pid in remaining:
            kill_tree(pid)
    assert remaining == []
    assert process.returncode == 0, output
    assert re.search("continues after (DistNetworkError|RuntimeError)", output), output  # RuntimeError before torch 2.7
    assert "before the ranks had connected" not in output


def test_all_processes_exit_if_the_port_of_the_rendezvous_is_taken(tmp_path):
    script, pids = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(PORT_IS_TAKEN)
    pids.mkdir()
    process = start_script(script, pids)
    try:
        output, _ = process.communicate(timeout=300)  # remaining processes keep the pipe open
        assert process.returncode == 1, output
        assert "EADDRINUSE" in output
    finally:
        remaining = [pid for pid in map(int, os.listdir(pids)) if runs(pid, script)]
        for pid in remaining:
            kill_tree(pid)
    assert remaining == []


def test_ranks_of_one_host_need_no_port(tmp_path):
    script, pids = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(PORT_IS_TAKEN.replace(", num_nodes=2", ", max_steps=1"))
    pids.mkdir()
    ran = run_script(script, pids)
    assert ran.returncode == 0, ran.stdout


def runs(pid: int, script: Path) -> bool:
    with suppress(psutil.Error):
        return str(script) in psutil.Process(pid).cmdline()
    return False
