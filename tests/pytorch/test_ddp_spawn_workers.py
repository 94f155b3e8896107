"""The workers of ``ddp_spawn_ext``: their number, their lifetime, and repeated transfers."""

import atexit
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import psutil
import pytest
import torch

from lightning_strategies_ext import DDPSpawnStrategy
from lightning_strategies_ext.launch.transport import memory_files
from tests.support.ddp_spawn_trainers import Configurable, Stateful, seeded, spawn_trainer
from tests.support.models import (
    MLP,
    assert_same_bits,
    fit,
    loader,
    make_trainer,
    state_of,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes


def workers_of_this_process() -> list[psutil.Process]:
    workers = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and "fork_server" in " ".join(process.cmdline()):
                workers.append(process)
    return workers


def test_a_search_over_many_trainers_has_the_workers_of_one():
    retained = []
    pids = set()
    for _ in range(4):
        model = MLP()
        trainer = spawn_trainer(max_epochs=1)
        trainer.fit(model, loader())
        pids.update(trainer.strategy.launcher.pids)
        retained.append((model, trainer))
    assert len(pids) == 2
    assert len(workers_of_this_process()) == 3  # two workers and the fork server
    first = retained[0][1]
    first.fit_loop.max_epochs = 2
    first.fit(retained[0][0], loader())
    assert set(first.strategy.launcher.pids) == pids
    assert first.global_step == 16
    three = spawn_trainer(devices=3, max_epochs=1)
    three.fit(MLP(), loader())
    assert len(workers_of_this_process()) == 4
    assert not pids & set(three.strategy.launcher.pids)


RATE = 0.01


class ReadsGlobal(MLP):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE)


def test_forked_workers_of_a_trainer_know_what_the_main_process_has_when_it_starts(monkeypatch):
    this_module = sys.modules[__name__]
    trainers, pids = [], set()

    def pids_after(trainer: pl.Trainer, model: MLP) -> list[int]:
        trainer.fit(model, loader())
        pids.update(trainer.strategy.launcher.pids)
        assert {pid for pid in pids if psutil.pid_exists(pid)} == set(trainer.strategy.launcher.pids)
        return trainer.strategy.launcher.pids

    for rate in (0.01, 0.5):
        monkeypatch.setattr(this_module, "RATE", rate)
        trainers.append(spawn_trainer("ddp_fork_ext", max_epochs=1))
        pids_after(trainers[-1], ReadsGlobal())
        assert trainers[-1].optimizers[0].param_groups[0]["lr"] == rate
    monkeypatch.setattr(this_module, "Later", type("Later", (MLP,), {"__module__": __name__}), raising=False)
    first_trainer = spawn_trainer("ddp_fork_ext", max_epochs=1)
    first = pids_after(first_trainer, this_module.Later())
    first_trainer.fit_loop.max_epochs = 2
    assert pids_after(first_trainer, this_module.Later()) == first
    monkeypatch.setattr(this_module, "RATE", 0.25)
    trainers[0].fit_loop.max_epochs = 2
    pids_after(trainers[0], ReadsGlobal())
    assert trainers[0].optimizers[0].param_groups[0]["lr"] == 0.25
    assert trainers[0].global_step == 16
    monkeypatch.setattr(this_module, "RATE", 0.125)
    trainers[0].strategy.close()
    trainers[0].fit_loop.max_epochs = 3
    pids_after(trainers[0], ReadsGlobal())
    assert trainers[0].optimizers[0].param_groups[0]["lr"] == 0.125


def test_workers_that_another_trainer_reuses_start_as_new_workers():
    expected = state_of(fit("ddp_spawn_ext", Stateful)[1])
    fit("ddp_spawn_ext", Configurable)
    assert_same_bits(state_of(fit("ddp_spawn_ext", Stateful)[1]), expected)


def test_workers_exit_without_keep_workers_or_when_closed():
    trainer, model = spawn_trainer(DDPSpawnStrategy(keep_workers=False), max_epochs=1), seeded(Stateful)
    trainer.fit(model, loader())
    assert trainer.strategy.launcher.pids == []
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader())
    assert trainer.global_step == 16
    with DDPSpawnStrategy() as strategy:
        again, other = spawn_trainer(strategy, max_epochs=1), seeded(Stateful)
        again.fit(other, loader())
        strategy.close()
        assert strategy.launcher.pids == []
        again.fit_loop.max_epochs = 2
        again.fit(other, loader())
        pids = strategy.launcher.pids
        assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))
    assert_same_bits(state_of(model), state_of(other))


class LeavesGroup(pl.Callback):
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        torch.distributed.destroy_process_group()


def fit_after_leaving_the_group() -> int:
    trainers = [make_trainer("ddp_ext", max_epochs=1, callbacks=[LeavesGroup()]) for _ in range(2)]
    for trainer in trainers:
        trainer.fit(MLP(), loader())
    return trainers[1].global_step


def test_a_stage_can_follow_where_the_user_has_left_the_process_group():
    trainer, model = spawn_trainer(max_epochs=1, callbacks=[LeavesGroup()]), MLP()
    trainer.fit(model, loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader())
    assert trainer.global_step == 16
    assert run_ranks(fit_after_leaving_the_group) == [8, 8]


def num_threads_and_exit_handler(path: str) -> int:
    atexit.register(Path(path).touch)
    return torch.get_num_threads()


def in_main(path: str) -> None:
    with Path(path).open("a") as file:
        file.write(str(os.getpid()))


@pytest.mark.parametrize(("start_method", "num_threads"), [("forkserver", 3), ("spawn", 3), ("fork", 1)])
def test_workers_run_their_exit_handlers_and_have_the_requested_threads(
    start_method, num_threads, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    atexit.register(in_main, str(tmp_path / "main"))
    try:
        with DDPSpawnStrategy(parallel_devices=[torch.device("cpu")] * 2, start_method=start_method) as strategy:
            assert strategy.spawn(num_threads_and_exit_handler, str(tmp_path / "ended")) == num_threads
            assert ("OMP_NUM_THREADS=3" in caplog.text) is (start_method == "fork")
            assert list(tmp_path.iterdir()) == []
    finally:
        atexit.unregister(in_main)
    assert [path.name for path in tmp_path.iterdir()] == ["ended"]


def threads_for_child_processes() -> tuple[str | None, int]:
    return os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_processes_that_a_worker_starts_compute_in_as_many_threads(start_method, monkeypatch):
    """Workers have the variable that Lightning's launchers set. The main process and its later children do not."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with DDPSpawnStrategy(parallel_devices=[torch.device("cpu")] * 2, start_method=start_method) as strategy:
        variable, num_threads = strategy.spawn(threads_for_child_processes)
        assert variable == str(num_threads)
        assert "OMP_NUM_THREADS" not in os.environ
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        assert strategy.spawn(threads_for_child_processes)[0] == "3"


def test_large_data_that_has_not_changed_is_not_written_again_and_what_has_is(monkeypatch):
    written = []
    write = memory_files.MemoryFile.write.__func__

    def recording(cls: Any, buffers: Any) -> Any:
        written.append(sum(memoryview(buffer).nbytes for buffer in buffers))
        return write(cls, buffers)

    monkeypatch.setattr(memory_files.MemoryFile, "write", classmethod(recording))
    model = HoldsLargeData()
    with DDPSpawnStrategy() as strategy:
        trainer = spawn_trainer(strategy, limit_test_batches=2)
        for _ in range(2):
            assert trainer.test(model, loader(), verbose=False)[0]["sum"] == model.samples.numel()
        assert max(written[:2]) >= model.samples.nbytes
        assert max(written[2:]) < 1 << 20
        model.samples.numpy()[0, 0] = 3  # without a change of the version counter
        model.table[-1, -1] += 5
        metrics = trainer.test(model, loader(), verbose=False)[0]
        assert (metrics["sum"], metrics["table"]) == (model.samples.numel() + 2, model.table.size + 5)
        assert num_cached_bytes(strategy) == model.samples.nbytes + model.table.nbytes
        written.clear()
        other = spawn_trainer()
        other.test(model, loader(), verbose=False)
        assert max(written) < 1 << 20  # a Trainer that takes over the workers also takes over the cache
        assert (num_cached_bytes(strategy), num_cached_bytes(other.strategy)) == (
            0,
            model.samples.nbytes + model.table.nbytes,
        )
    other.strategy.close()
    assert num_cached_bytes(other.strategy) == 0


def num_cached_bytes(strategy: DDPSpawnStrategy) -> int:
    return strategy.launcher.workers._cache.num_bytes


class HoldsLargeData(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.samples = torch.ones(1024, 1024)
        self.table = np.ones((1024, 512))

    def test_step(self, batch, batch_idx):
        self.log_dict({"sum": self.samples.sum(), "table": float(self.table.sum())})
        if self.global_rank == 1:
            self.samples.zero_()  # remains in this worker


class SlowToSend:
    """An object whose pickling takes two seconds, and writes a file at its start."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        Path(self.path).touch()
        time.sleep(2)
        return str, (f"sent by {os.getpid()}",)


def test_workers_whose_results_are_in_transfer_are_not_reused(tmp_path):
    devices = [torch.device("cpu")] * 2
    path = tmp_path / "sending"
    with DDPSpawnStrategy(parallel_devices=devices) as one, DDPSpawnStrategy(parallel_devices=devices) as other:
        with ThreadPoolExecutor() as threads:
            first = threads.submit(one.spawn, SlowToSend, str(path))
            while not path.exists() and not first.done():
                time.sleep(0.02)
            pid = other.spawn(os.getpid)
            assert first.result() != f"sent by {pid}"
        assert first.result().startswith("sent by ")
