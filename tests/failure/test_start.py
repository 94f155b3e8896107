"""A rank that fails before the ranks have met: nobody is left that waits for it."""

import time
from contextlib import suppress

import psutil

from tests.support.ranks import kill_tree, start_script

PORT_IS_TAKEN = """
import os
import socket

from tests.support.models import MLP, loader, make_trainer

if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        taken = socket.create_server(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
    make_trainer("ddp_ext", devices=3).fit(MLP(), loader())
"""


def test_where_the_port_of_the_rendezvous_is_taken_all_processes_end(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PORT_IS_TAKEN)
    process, started = start_script(script), set()
    try:
        while process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                started |= set(psutil.Process(process.pid).children(recursive=True))
            time.sleep(0.02)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 1, output
        assert "EADDRINUSE" in output
        assert len(started) >= 2
        assert psutil.wait_procs(started, timeout=60)[1] == []
    finally:
        kill_tree(process.pid)
        for other in filter(psutil.Process.is_running, started):
            other.kill()
