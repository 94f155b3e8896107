"""A script that ends on one rank between two stages: the others, who wait in the next one, end too, and say why.

Or in the last hook of a stage, when the others have gone on.
"""

import re
import time
from pathlib import Path

import pytest

from tests.support.ranks import run_warm

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
        ("exit", "its script has come to its end, and rank 1 waits for it in a stage|is gone"),
    ],
)
def test_the_others_end_too(tmp_path: Path, how: str, reason: str, rank: int):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    begin = time.monotonic()
    result = run_warm(script, how, str(rank), cwd=tmp_path)
    assert time.monotonic() - begin < 60  # patience is five minutes
    assert result.returncode != 0, result.stdout
    assert re.search(reason.format(rank=rank), result.stdout), result.stdout
    assert "validated" not in result.stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_they_do_not_wait_for_the_end_of_the_process(tmp_path: Path, rank: int):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = run_warm(script, "teardown", str(rank), cwd=tmp_path)
    assert result.returncode != 0
    before, _, _ = result.stdout.partition("gone")
    assert re.search(f"rank {rank} on .* failed first, .*:\n(.*\n)+ValueError: no plot", before), result.stdout
    assert re.search(f"[Rr]ank {1 - rank} ended because rank {rank} failed", before), result.stdout
    assert "gone" in result.stdout
