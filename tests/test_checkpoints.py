"""Atomic checkpoints: a process that is killed during a save leaves the last complete checkpoint, and no other file."""

import mmap
import os
import random
import resource
import signal
import stat
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_strategies_ext import DataParallelStrategy, DDPSpawnStrategy, DDPStrategy, checkpoints, fabric
from lightning_strategies_ext.checkpoints import AtomicCheckpointIO
from tests.support.models import MLP, loader

NUMEL = 500_000
NUM_KILLS = 200


class Child:
    """A forked process that is killed at some time, and the last number that it has reported."""

    def __init__(self, work: Callable[[Callable[[int], None]], None]) -> None:
        self._reported = mmap.mmap(-1, 8)
        self._pid = os.fork()
        if self._pid == 0:
            try:
                work(self._report)
            finally:
                os._exit(1)  # the process must be killed

    def _report(self, number: int) -> None:
        struct.pack_into("q", self._reported, 0, number)

    @property
    def last_reported(self) -> int:
        return int(struct.unpack_from("q", self._reported)[0])

    def kill_after(self, seconds: float) -> None:
        """Kills the process some seconds after its first number."""
        try:
            deadline = time.monotonic() + 60
            while not self.last_reported and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(seconds)
        finally:
            os.kill(self._pid, signal.SIGKILL)
            _, status = os.waitpid(self._pid, 0)
        assert os.WIFSIGNALED(status), "the process has exited before it was killed"


def numbered(number: int) -> dict[str, Any]:
    return {"number": number, "weights": torch.full((NUMEL,), float(number))}


def kill_while_saving(io: CheckpointIO, path: Path, num_kills: int, seed: int = 0) -> int:
    """Kills processes that save numbered checkpoints; each process continues with the number of the previous process.

    Returns:
        The number of processes that left a file that cannot be loaded, or that is older than the last save.
    """
    draw, number, num_lost = random.Random(seed), 0, 0

    def save(report: Callable[[int], None]) -> None:
        for next_number in range(number + 1, number + 10_000):
            io.save_checkpoint(numbered(next_number), path)
            report(next_number)

    for _ in range(num_kills):
        child = Child(save)
        child.kill_after(draw.uniform(0, 0.03))
        try:
            found = io.load_checkpoint(path)
            is_whole = bool(found["weights"].eq(found["number"]).all()) and found["number"] >= child.last_reported
        except Exception:
            is_whole = False
        num_lost += not is_whole
        number = found["number"] if is_whole else child.last_reported
    return num_lost


@pytest.mark.processes
@pytest.mark.timeout(900)
def test_a_process_that_is_killed_at_any_time_leaves_a_complete_checkpoint(tmp_path: Path):
    path = tmp_path / "last.ckpt"
    assert kill_while_saving(AtomicCheckpointIO(), path, NUM_KILLS) == 0
    AtomicCheckpointIO().save_checkpoint(numbered(0), path)
    assert os.listdir(tmp_path) == ["last.ckpt"]


@pytest.mark.processes
def test_a_killed_process_leaves_a_complete_checkpoint_without_unnamed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delattr(os, "O_TMPFILE")
    assert kill_while_saving(AtomicCheckpointIO(), tmp_path / "last.ckpt", 30) == 0


@pytest.mark.processes
def test_the_kills_detect_a_save_that_is_not_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("this host has no second file system")
    with tempfile.TemporaryDirectory(dir=other) as directory:
        monkeypatch.setattr("tempfile.tempdir", directory)
        lost = (kill_while_saving(TorchCheckpointIO(), tmp_path / "last.ckpt", 10, seed) for seed in range(30))
        assert any(lost)


class Saves(pl.Callback):
    """A callback that reports the minimum number of steps of the newest checkpoint."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self.report = report

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step:
            self.report(trainer.global_step)


class Large(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(NUMEL))

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.processes
@pytest.mark.parametrize("save_top_k", [1, 3])
def test_with_model_checkpoint_the_last_and_the_best_load(tmp_path: Path, save_top_k: int):
    draw = random.Random(save_top_k)

    def train(report: Callable[[int], None]) -> None:
        saver = ModelCheckpoint(
            tmp_path, save_last=True, save_top_k=save_top_k, monitor="loss", every_n_train_steps=1, filename="{step}"
        )
        trainer = pl.Trainer(
            strategy=DataParallelStrategy(), accelerator="cpu", devices=1, max_epochs=1000, logger=False,
            callbacks=[Saves(report), saver], enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Large(), loader())

    for _ in range(6):
        for path in tmp_path.iterdir():
            path.unlink()
        child = Child(train)
        child.kill_after(draw.uniform(0.05, 0.3))
        found = {path.name: torch.load(path, weights_only=False) for path in tmp_path.glob("*.ckpt")}
        assert "last.ckpt" in found
        num_saved = min(save_top_k, child.last_reported)
        assert num_saved + 1 <= len(found) <= save_top_k + 2  # a new checkpoint is written before an old one is deleted
        assert found["last.ckpt"]["global_step"] >= child.last_reported
        for checkpoint in found.values():
            assert checkpoint["state_dict"]["steps"].eq(checkpoint["global_step"]).all()


OTHER_USER, USER = 65534, 65533


@pytest.mark.processes
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("has_names", [False, True])
def test_files_of_another_user_do_not_prevent_a_save(has_names: bool, monkeypatch: pytest.MonkeyPatch):
    if has_names:
        monkeypatch.delattr(os, "O_TMPFILE")
    names: set[str] = set()

    def save_as_user(path: Path) -> None:
        os.setgroups([])
        os.setgid(USER)
        os.setuid(USER)
        replace = os.replace
        for number in range(3):
            checkpoints.os.replace = lambda old, new: (names.add(Path(old).name), replace(old, new))
            AtomicCheckpointIO().save_checkpoint(numbered(number), path)
        os._exit(7 if len(names) == 3 else 1)

    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        path = Path(directory, "last.ckpt")
        os.chmod(directory, 0o1777)
        for name in (".last.ckpt.whole", ".last.ckpt.01234567.whole", ".last.ckpt.01234567"):
            path.with_name(name).touch()
            os.chown(path.with_name(name), OTHER_USER, OTHER_USER)
        created = set(os.listdir(directory))
        pid = os.fork()
        if pid == 0:
            try:
                save_as_user(path)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert set(os.listdir(directory)) == {"last.ckpt", *created}


def test_the_next_save_removes_the_temporary_file_of_a_killed_process(tmp_path: Path):
    if not hasattr(os, "O_TMPFILE"):
        pytest.skip("this system has no unnamed files, so the file of a killed process remains")
    (tmp_path / ".last.ckpt.01234567.whole").touch()
    (tmp_path / ".other.ckpt.01234567.whole").touch()  # a running process may be about to rename it
    AtomicCheckpointIO().save_checkpoint(numbered(1), tmp_path / "last.ckpt")
    assert sorted(os.listdir(tmp_path)) == [".other.ckpt.01234567.whole", "last.ckpt"]


def write_much(path: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    AtomicCheckpointIO().save_checkpoint(numbered(2), path)


@pytest.mark.processes
@pytest.mark.parametrize("has_names", [False, True])
def test_a_failed_save_leaves_the_previous_checkpoint(tmp_path: Path, has_names: bool, monkeypatch: pytest.MonkeyPatch):
    if has_names:
        monkeypatch.delattr(os, "O_TMPFILE")
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(numbered(1), path)
    pid = os.fork()
    if pid == 0:
        try:
            write_much(path)
        except (OSError, RuntimeError):
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert AtomicCheckpointIO().load_checkpoint(path)["number"] == 1
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_checkpoint_has_the_permissions_of_other_files(tmp_path: Path):
    before = os.umask(0o027)
    try:
        AtomicCheckpointIO().save_checkpoint(numbered(1), tmp_path / "new" / "a.ckpt")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new" / "a.ckpt").stat().st_mode) == 0o640


def test_a_path_that_is_not_a_local_file_is_saved_by_lightning():
    AtomicCheckpointIO().save_checkpoint({"number": 3}, "memory://checkpoints/a.ckpt")
    assert AtomicCheckpointIO().load_checkpoint("memory://checkpoints/a.ckpt") == {"number": 3}
    with pytest.raises(TypeError, match="storage_options"):
        AtomicCheckpointIO().save_checkpoint({}, "a.ckpt", storage_options={"a": 1})


STRATEGIES = [DDPStrategy, DDPSpawnStrategy, DataParallelStrategy, fabric.DDPStrategy, fabric.DataParallelStrategy]


@pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: f"{kind.__module__.split('.')[-2]}.{kind.__name__}")
def test_strategies_save_atomically_unless_the_user_passes_a_checkpoint_io(kind: Any):
    assert isinstance(kind().checkpoint_io, AtomicCheckpointIO)
    io = TorchCheckpointIO()
    assert kind(checkpoint_io=io).checkpoint_io is io
    around = AsyncCheckpointIO()
    assert kind(checkpoint_io=around).checkpoint_io is around
    assert isinstance(around.checkpoint_io, AtomicCheckpointIO)
    around = AsyncCheckpointIO(io)
    assert kind(checkpoint_io=around).checkpoint_io.checkpoint_io is io
    strategy = kind()
    strategy.checkpoint_io = io
    assert strategy.checkpoint_io is io


def test_a_checkpoint_is_synced_to_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(checkpoints.os, "fsync", lambda descriptor: (order.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(checkpoints.os, "replace", lambda *paths: (order.append("replace"), replace(*paths)))
    AtomicCheckpointIO().save_checkpoint(numbered(1), tmp_path / "a.ckpt")
    assert order == ["fsync", "replace", "fsync"]
