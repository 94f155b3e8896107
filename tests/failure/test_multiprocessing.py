"""Ranks that the user starts with multiprocessing: such a process exits without ``atexit`` and ``sys.excepthook``.

A process that exits regularly does not count as killed, and an uncaught exception is reported to the other ranks.
"""

import re
import time
from pathlib import Path

import pytest

from tests.support.ranks import run_script

pytestmark = pytest.mark.processes

SCRIPT = """
import os
import sys
import time

import torch.multiprocessing
from lightning.fabric import Fabric

from benchmarks.rank_launcher import free_port
from lightning_strategies_ext.failure.failure_monitor import known_failure
from tests.support.models import MLP, loader, make_trainer


def meet_under_fabric():
    fabric = Fabric(strategy="ddp_ext", accelerator="cpu", devices=2)
    fabric.launch()
    return fabric.barrier


def meet_in_a_stage():
    trainer, model = make_trainer("ddp_ext", max_epochs=1), MLP()
    trainer.fit(model, loader())
    return lambda: trainer.validate(model, loader())


def rank_main(rank, meet, how, first, port):
    os.environ |= {"MASTER_PORT": str(port), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    meet_again = globals()[meet]()
    if how == "end":
        time.sleep(0 if rank == first else 1.5)
        print("rank", rank, "knows of", known_failure(), flush=True)
    elif rank != first:
        meet_again()
    elif how == "raise":
        raise ValueError("no plot")
    elif how == "exit":
        sys.exit(3)
    else:
        os._exit(0)


if __name__ == "__main__":
    starter, *rest, first = sys.argv[1:]
    args = (*rest, int(first), free_port())
    if starter == "torch":
        kwargs = {"nprocs": 2, "start_method": "fork", "join": False}  # with it, torch would terminate the other ranks
        ranks = torch.multiprocessing.start_processes(rank_main, args, **kwargs).processes
    else:
        context = torch.multiprocessing.get_context("fork")
        ranks = [context.Process(target=rank_main, args=(rank, *args)) for rank in range(2)]
        for rank in ranks:
            rank.start()
    for rank in ranks:
        rank.join()
    print("exit codes", *(rank.exitcode for rank in ranks))
"""


@pytest.fixture
def run(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run_it(*arguments: str) -> str:
        begin = time.monotonic()
        output = run_script(script, *arguments, cwd=tmp_path).stdout
        assert time.monotonic() - begin < 280, output  # the hang timeout is five minutes
        return output

    return run_it


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_exits_before_the_other_ranks_has_not_failed(run, first: int):
    output = run("multiprocessing", "meet_under_fabric", "end", str(first))
    assert "exit codes 0 0" in output
    known_failures = re.findall(r"rank \d knows of .*", output)
    assert known_failures == [f"rank {rank} knows of None" for rank in (first, 1 - first)]


@pytest.mark.parametrize(
    ("starter", "meet", "how", "first", "headline", "exit_code"),
    [
        ("multiprocessing", "meet_under_fabric", "raise", 1, "ValueError: no plot", 1),
        ("multiprocessing", "meet_in_a_stage", "raise", 0, "ValueError: no plot", 1),
        ("multiprocessing", "meet_under_fabric", "exit", 0, "SystemExit: 3", 3),
        ("multiprocessing", "meet_under_fabric", "leave", 1, "its process .* exited for an unknown reason", 0),
        ("torch", "meet_under_fabric", "raise", 1, "ValueError: no plot", 1),
    ],
)
def test_an_uncaught_exception_ends_the_other_ranks_and_is_reported(
    run, starter: str, meet: str, how: str, first: int, headline: str, exit_code: int
):
    output = run(starter, meet, how, str(first))
    assert re.search(f"rank {first} on .* failed first, .*:\n(.*\n)*{headline}", output), output
    codes = [int(code) for code in re.search("exit codes (.*)", output)[1].split()]
    assert codes[first] == exit_code
    assert codes[1 - first] > 0
