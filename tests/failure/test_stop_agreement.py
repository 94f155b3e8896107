"""What becomes of an agreement on a SIGTERM when a rank dies that it needs."""

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from lightning.pytorch.callbacks import Callback

from tests.support.models import fit
from tests.support.ranks import outcomes_of_ranks

pytestmark = pytest.mark.processes

LAST = 2


class DieDuringAgreement(Callback):
    """After five steps rank 1 gets a SIGTERM, to which rank 2, which is stopped, does not answer until it is killed."""

    def __init__(self, directory: Path) -> None:
        self.pid = directory / "pid"

    def setup(self, trainer, pl_module, stage):
        if trainer.global_rank == LAST:
            self.pid.write_text(str(os.getpid()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step != 5:
            return
        if trainer.global_rank == LAST:
            os.kill(os.getpid(), signal.SIGSTOP)
        last = psutil.Process(int(self.pid.read_text()))
        while last.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        if trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Timer(2.0, last.kill).start()  # when the others wait for it to say how far it is
        time.sleep(0.5)


def train(directory: Path) -> None:
    fit("ddp_ext", devices=3, max_epochs=-1, callbacks=[DieDuringAgreement(directory)])


def test_a_rank_that_dies_while_the_others_agree_is_named_and_nobody_stops_as_if_all_had_agreed(tmp_path: Path):
    outcomes = outcomes_of_ranks(train, tmp_path, world_size=3)
    assert outcomes[LAST].exit_code == -signal.SIGKILL
    for outcome in outcomes[:LAST]:
        assert outcome.error is not None, outcome
        assert f"RankFailedError: rank {LAST} on" in outcome.error, outcome
        assert outcome.exit_code != 0, outcome
