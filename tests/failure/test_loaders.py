"""DataLoader workers exit with their ranks; otherwise, they would detect the exit only after up to five seconds."""

import multiprocessing
import subprocess
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from lightning_strategies_ext._system.peers import kill_with_forked_children
from tests.support.ranks import start_script

pytestmark = pytest.mark.processes

fork = multiprocessing.get_context("fork")


def start_others(sender: Connection) -> None:
    """Forks two processes, like a DataLoader, starts a program, and sends the process IDs."""
    forked = [fork.Process(target=time.sleep, args=(600,), daemon=True) for _ in range(2)]
    for process in forked:
        process.start()
    program = subprocess.Popen(["sleep", "600"])
    sender.send([*(process.pid for process in forked), program.pid])
    time.sleep(600)


@pytest.mark.forked
def test_a_rank_is_killed_with_its_forked_children_but_no_programs_or_other_ranks():
    receiver, sender = fork.Pipe()
    rank = fork.Process(target=start_others, args=(sender,))
    rank.start()
    assert receiver.poll(60)
    pids = receiver.recv()
    forked, spared, program = map(psutil.Process, pids)
    try:
        kill_with_forked_children(rank.pid, {spared.pid})
        rank.join()
        psutil.wait_procs([forked], timeout=60)
        remaining = [process for process in (forked, spared, program) if process.is_running()]
        assert [process for process in remaining if process.status() != psutil.STATUS_ZOMBIE] == [spared, program]
    finally:
        for process in (spared, program):
            process.kill()


SCRIPT_WITH_LOADERS = """
import os
import sys
from pathlib import Path

from tests.support.models import MLP, loader, make_trainer


class Fails(MLP):
    def validation_step(self, batch, batch_idx):
        if self.trainer.global_rank == 0:
            raise ValueError("no")
        return super().validation_step(batch, batch_idx)


def note(worker: int) -> None:
    Path(sys.argv[1], str(os.getpid())).touch()


loaders = [loader(num_workers=1, worker_init_fn=note) for _ in range(2)]
make_trainer("ddp_ext", max_epochs=1, num_sanity_val_steps=0).fit(Fails(), *loaders)
"""


def test_dataloader_workers_exit_after_an_exception_on_one_rank(tmp_path: Path):
    (tmp_path / "pids").mkdir()
    (tmp_path / "script.py").write_text(SCRIPT_WITH_LOADERS)
    process = start_script(tmp_path / "script.py", tmp_path / "pids", cwd=tmp_path)
    assert process.wait(120) != 0
    pids = [int(path.name) for path in (tmp_path / "pids").iterdir()]
    assert len(pids) >= 3
    deadline = time.monotonic() + 2.0
    while remaining := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, remaining
        time.sleep(0.02)
    process.communicate()
