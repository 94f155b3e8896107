"""Memory of a large model with ``ddp_spawn_ext``: workers share it unless they write; its return is cheap."""

import gc
import os
from pathlib import Path

import lightning.pytorch as pl
import psutil
import pytest
import torch

from tests.support.ddp_spawn_trainers import seeded, spawn_trainer
from tests.support.models import MLP, assert_same_bits, loader, state_of

pytestmark = pytest.mark.processes


class Large(MLP):
    """A model with 128 MB, which steps change only on request."""

    def __init__(self, changes: bool = False) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(32 << 20))
        self.changes = changes

    def validation_step(self, batch, batch_idx):
        assert self.table.sum() == self.table.numel()
        return super().validation_step(batch, batch_idx)

    def on_train_end(self):
        if self.changes:
            self.table.mul_(3)


class PrivateMemory(pl.Callback):
    """A callback that records the private memory of a worker in bytes, without pages that other processes share."""

    num_bytes = 0

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        memory = psutil.Process().memory_full_info()
        self.num_bytes = int(trainer.strategy.reduce(torch.tensor(memory.uss), reduce_op="max"))


def test_a_large_model_that_is_only_read_is_not_copied_into_each_worker():
    small, large = PrivateMemory(), PrivateMemory()
    spawn_trainer(callbacks=[small]).validate(MLP(), loader(), verbose=False)
    spawn_trainer(callbacks=[large]).validate(Large(), loader(), verbose=False)
    assert small.num_bytes > 0
    assert large.num_bytes - small.num_bytes < 32 << 20


def test_a_forked_worker_copies_no_objects_of_the_main_process():
    few, many = PrivateMemory(), PrivateMemory()
    spawn_trainer("ddp_fork_ext", callbacks=[few]).validate(MLP(), loader(), verbose=False)
    objects = [[index] for index in range(1_000_000)]  # 88 MB, to which a garbage collection writes
    spawn_trainer("ddp_fork_ext", callbacks=[many]).validate(MLP(), loader(), verbose=False)
    assert len(objects) == 1_000_000
    assert few.num_bytes > 0
    assert many.num_bytes - few.num_bytes < 32 << 20


def test_returning_a_large_model_needs_little_more_memory_than_the_model():
    model = Large(changes=True)
    trainer = spawn_trainer(max_epochs=1)
    trainer.validate(MLP(), loader(), verbose=False)
    gc.collect()
    address = model.table.data_ptr()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = psutil.Process().memory_info().rss
    trainer.fit(model, loader())
    status = Path("/proc/self/status").read_text()
    peak = 1024 * int(status.split("VmHWM:")[1].split()[0])
    assert model.table.data_ptr() == address
    assert torch.equal(model.table, torch.full_like(model.table, 3))
    assert peak - before < 1.2 * model.table.nbytes


def test_without_shared_memory_results_use_a_file_and_this_is_logged_once(monkeypatch, caplog, tmp_path):
    import tempfile

    from lightning_strategies_ext.launch.transport import memory_files

    monkeypatch.delattr(os, "memfd_create")  # as on a system without memfd_create, also in forked workers
    monkeypatch.setattr(memory_files, "_has_logged_fallback", False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, expected = seeded(), seeded()
    trainer = spawn_trainer("ddp_fork_ext", max_epochs=1)
    trainer.fit(model, loader())
    predictions = trainer.predict(model, loader(13))
    trainer.strategy.launcher.close()
    assert caplog.text.count(f"through files in {tmp_path}") == 1
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    other = spawn_trainer(max_epochs=1)
    other.fit(expected, loader())
    assert_same_bits(state_of(model), state_of(expected))
    for ext, single in zip(predictions, other.predict(expected, loader(13)), strict=True):
        assert torch.equal(ext, single)
