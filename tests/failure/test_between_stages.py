"""A script that ends on one rank between two stages: ranks that wait in the next stage exit too, and report why.

Also: failures in the last hook of a stage, after which other ranks have continued, and after the last collective.
"""

import re
import time
from pathlib import Path

import pytest

from tests.support.ranks import run_script

pytestmark = pytest.mark.processes

SCRIPT = """
import atexit
import sys
import time

from tests.support.models import MLP, loader, make_trainer

how, rank = sys.argv[1], int(sys.argv[2])


def end():
    time.sleep(3)
    print("gone", flush=True)


class Model(MLP):
    def teardown(self, stage):
        if self.trainer.global_rank == rank and how == "teardown":
            atexit.register(end)
            raise ValueError("no plot")


trainer, model = make_trainer("ddp_ext", max_epochs=1), Model()
trainer.fit(model, loader())
if trainer.global_rank == rank and how == "raise":
    raise ValueError("no plot")
if trainer.global_rank == rank:
    sys.exit()
trainer.validate(model, loader())
print("validated")
"""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "rank {rank} on .* failed first, in between two stages:\n(.*\n)+ValueError: no plot"),
        ("exit", r"its script ended while rank \d waits|unknown reason|with exit code 0|rank {rank} .*has left"),
    ],
)
def test_the_other_ranks_exit_after_a_failure_between_stages(tmp_path: Path, how: str, reason: str, rank: int):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    begin = time.monotonic()
    result = run_script(script, how, str(rank), cwd=tmp_path)
    assert time.monotonic() - begin < 250  # the hang timeout is five minutes
    assert result.returncode != 0, result.stdout
    assert re.search(reason.format(rank=rank), result.stdout), result.stdout
    assert "validated" not in result.stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_the_other_ranks_do_not_wait_for_the_exit_of_the_process(tmp_path: Path, rank: int):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = run_script(script, "teardown", str(rank), cwd=tmp_path)
    assert result.returncode != 0
    before, _, _ = result.stdout.partition("gone")
    assert re.search(f"rank {rank} on .* failed first, .*:\n(.*\n)+ValueError: no plot", before), result.stdout
    assert re.search(f"[Rr]ank {1 - rank} exited because rank {rank} failed", before), result.stdout
    assert "gone" in result.stdout


LATE_SCRIPT = """
import time

import torch
from lightning.fabric import Fabric

fabric = Fabric(strategy="ddp_ext", accelerator="cpu", devices=2)
fabric.launch()
fabric.barrier()
if fabric.global_rank == 1:
    time.sleep(0.5)
    raise ValueError("no plot")
"""


def test_under_fabric_rank_0_waits_at_its_exit_and_reports_a_later_failure(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(LATE_SCRIPT)
    result = run_script(script, cwd=tmp_path)
    assert result.returncode == 1, result.stdout
    block = r"rank 1 on .* failed first, .*:\n(.*\n)*.*script.py:\d+ in <module>\nValueError: no plot"
    assert re.search(block, result.stdout), result.stdout
    assert "did not exit by itself" not in result.stdout
