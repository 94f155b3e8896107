"""A collective that only rank 0 calls: the error has the call, its location, and the activity of rank 1."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.distributed.distributed_c10d import _set_pg_timeout

from lightning_strategies_ext import DDPStrategy, HorovodStrategy
from lightning_strategies_ext.failure.failure_monitor import known_failure
from lightning_strategies_ext.failure.failure_report import one_line_cause
from tests.support.horovod_ranks import try_horovod
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import outcomes_of_ranks

pytestmark = pytest.mark.processes

ENGINES = ["shm", "gloo", "horovod"]


class GathersAlone(MLP):
    def test_step(self, batch, batch_idx):
        pass

    def on_test_epoch_end(self):
        if self.trainer.is_global_zero:
            self.all_gather(torch.ones(1))


def make(engine: str) -> Trainer:
    strategy: Any = HorovodStrategy() if engine == "horovod" else DDPStrategy(process_group_backend=engine)
    return make_trainer(strategy, max_epochs=1, limit_train_batches=2)


def run_on_rank_0(engine: str, function: Any, *args: Any) -> Any:
    """Runs a function on both ranks, and returns the value of rank 0; rank 1 may exit with an error after it."""
    if engine == "horovod":
        output, outcomes = try_horovod("horovodrun", function, engine, *args)
        assert 0 in outcomes, output
        return outcomes[0]
    first, _ = outcomes_of_ranks(function, engine, *args)
    assert first.value is not None, first
    return first.value


def wait_for(file: Path) -> None:
    while not file.exists():  # the process of rank 1 stays alive
        time.sleep(0.1)


def gather(engine: str, output: str) -> tuple[str, float]:
    trainer = make(engine)
    trainer.fit(GathersAlone(), loader())
    start = time.monotonic()
    try:
        trainer.test(GathersAlone(), loader(), verbose=False)
    except Exception as error:
        Path(output).touch()
        return str(error), time.monotonic() - start
    wait_for(Path(output))
    return "", 0.0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_lone_all_gather_is_named_while_the_other_rank_has_finished_the_stage(engine: str, tmp_path: Path):
    text, seconds = run_on_rank_0(engine, gather, str(tmp_path / "output"))
    assert "rank 1, which has already finished this stage" in text
    assert "`all_gather` in on_test_epoch_end" in text
    assert f"{__file__}:" in text
    assert seconds < 60  # two seconds on an idle machine


def save(engine: str, directory: str, then: str) -> tuple[str, float]:
    trainer = make(engine)
    model = MLP()
    trainer.fit(model, loader())
    output, start = Path(directory, "output"), time.monotonic()
    try:
        if trainer.is_global_zero:
            trainer.save_checkpoint(Path(directory, "final.ckpt"))
        if then == "validates":
            trainer.validate(model, loader(), verbose=False)
    except Exception as error:
        output.touch()
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "", 0.0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_lone_save_checkpoint_is_named_after_the_other_rank_has_exited(engine: str, tmp_path: Path):
    text, seconds = run_on_rank_0(engine, save, str(tmp_path), "exits")
    assert "barrier Trainer.save_checkpoint failed" in text
    assert "`save_checkpoint` in save" in text
    assert "rank 1 has" in text
    assert seconds < 60


@pytest.mark.parametrize("engine", ENGINES)
def test_a_lone_save_checkpoint_is_named_while_the_other_rank_validates(engine: str, tmp_path: Path):
    text, seconds = run_on_rank_0(engine, save, str(tmp_path), "validates")
    assert "barrier Trainer.save_checkpoint failed" in text
    assert "`save_checkpoint` in save" in text
    assert seconds < 60


class Computes(MLP):
    def __init__(self, output: str) -> None:
        super().__init__()
        self.output = Path(output)

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.trainer.global_rank == 1:
            while not self.output.exists():
                torch.rand(100, 100) @ torch.rand(100, 100)
        return self.loss(batch)

    def on_train_start(self):
        _set_pg_timeout(timedelta(seconds=10))  # after the start, which may take longer


def train_with_a_short_timeout(output: str) -> str:
    try:
        make("gloo").fit(Computes(output), loader())
    except Exception as error:
        failure = known_failure()
        assert failure is not None
        Path(output).touch()
        return f"{error}\n{one_line_cause(failure)}"
    return ""


def test_after_a_timeout_the_rank_that_computes_is_named(tmp_path: Path):
    first, _ = outcomes_of_ranks(train_with_a_short_timeout, str(tmp_path / "output"))
    assert first.value is not None, first
    text = first.value
    assert text.startswith("Rank 1 has not joined a collective in which rank 0 has waited until its timeout. Rank 1 ")
    assert "increase the argument.\n" in text
    assert "Timed out" in text
    assert text.splitlines()[-1].startswith("rank 0 failed: Rank 1 has not joined")
