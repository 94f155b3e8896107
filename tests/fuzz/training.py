"""Runs a :class:`~tests.fuzz.cases.Case` in this process, with a strategy of this package or with its reference.

    results = run(case, "ext", directory)  # "stock": Lightning's `ddp`; "one": one device on the whole batch

Each rank writes a file at the end of each stage, `stage-STAGE.rank-RANK`: the state of the model, the optimizers, the
schedulers, and the random generator; the order of hooks; the samples of each batch.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy as StockDDPStrategy

from lightning_strategies_ext import DataParallelStrategy, DDPSpawnStrategy, DDPStrategy, HorovodStrategy
from tests.fuzz.cases import Case
from tests.fuzz.data import SEED, Data
from tests.fuzz.models import Model, Recorder, state_of
from tests.support.models import LOADS_EVERYTHING

try:
    from lightning.pytorch.callbacks import EMAWeightAveraging
except ImportError:  # before Lightning 2.6
    EMAWeightAveraging = None


@dataclass
class Results:
    """The results of a case in one process.

    Attributes:
        returned: What each stage returned.
        states: State of this process after each stage.
    """

    returned: list[Any] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)


class Unfreeze(pl.Callback):
    """A callback that unfreezes the first layer at the second epoch."""

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.net.first.requires_grad_(True)


class Kill(pl.Callback):
    """A callback that kills the process of rank 1, once."""

    def __init__(self, step: int, flag: Path) -> None:
        self.step, self.flag = step, flag

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == self.step and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def strategy_of(case: Case, kind: str) -> Any:
    if kind == "one":
        return "auto"
    common: dict[str, Any] = {}
    if case.strategy in ("ddp_ext", "ddp_spawn_ext", "ddp_fork_ext") or kind == "stock":
        common = {"gradient_as_bucket_view": case.bucket_view, "static_graph": case.static_graph}
        common["find_unused_parameters"] = case.needs_find_unused
    if kind == "stock":
        return StockDDPStrategy(process_group_backend="gloo", **common)
    if case.uneven:
        common["uneven_inputs"] = case.uneven
    if case.strategy == "dp_ext":
        return DataParallelStrategy()
    if case.strategy == "horovod_ext":
        return HorovodStrategy(broadcast_buffers=case.reference == "ddp", **common)
    if case.backend == "gloo" or (case.world_size > 2 and not case.is_close_enough):
        common["process_group_backend"] = "gloo"
    if case.compression:
        common["compression"] = case.compression
    if case.strategy == "ddp_ext":
        return DDPStrategy(**common)
    if case.kill:
        common |= {"elastic": True, "commit_every_n_steps": 1, "max_restarts": 2}
    method = "fork" if case.strategy == "ddp_fork_ext" else "forkserver"
    return DDPSpawnStrategy(start_method=method, **common)


def callbacks_of(case: Case, directory: Path) -> list[pl.Callback]:
    makers: dict[str, Callable[[], pl.Callback]] = {
        "ema": lambda: EMAWeightAveraging(decay=0.9),
        "swa": lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1),
        "early_stopping": lambda: EarlyStopping("val_loss", patience=0, min_delta=0.5),
        "accumulation": lambda: GradientAccumulationScheduler({0: 2, 1: 1}),
        "epoch": lambda: ModelCheckpoint(directory / "checkpoints", save_last=True, save_top_k=-1),
        "steps": lambda: ModelCheckpoint(directory / "checkpoints", every_n_train_steps=2, save_top_k=-1),
        "best": lambda: ModelCheckpoint(directory / "checkpoints", monitor="val_loss", save_top_k=1),
    }
    drawn = [makers[name]() for name in (case.callback, case.checkpoint) if name]
    if case.unfreeze:
        drawn.append(Unfreeze())
    if case.kill:
        drawn.append(Kill(case.kill, directory / "killed"))
    return drawn


def trainer_of(case: Case, kind: str, directory: Path, recorder: Recorder, max_epochs: int) -> pl.Trainer:
    automatic: dict[str, Any] = {}
    if case.optimization == "automatic":
        automatic["accumulate_grad_batches"] = case.accumulate
        if case.clip is not None:
            automatic |= {"gradient_clip_algorithm": case.clip[0], "gradient_clip_val": case.clip[1]}
    return pl.Trainer(
        accelerator="cpu",
        devices=1 if kind == "one" else case.world_size,
        strategy=strategy_of(case, kind),
        logger=False,
        enable_checkpointing=bool(case.checkpoint),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        max_epochs=max_epochs,
        max_steps=case.max_steps,
        limit_train_batches=case.limit_train,
        limit_val_batches=case.limit_val,
        val_check_interval=case.val_check_interval,
        check_val_every_n_epoch=case.check_val_every_n_epoch,
        precision=case.precision,
        num_sanity_val_steps=case.num_sanity_val_steps,
        reload_dataloaders_every_n_epochs=case.reload_every_n_epochs,
        sync_batchnorm=case.sync_batchnorm and kind != "one",
        callbacks=[recorder, *callbacks_of(case, directory)],
        log_every_n_steps=1,
        **automatic,
    )


def run(case: Case, kind: str, directory: Path) -> Results:
    """Runs all stages of a case, and returns the results of this process."""
    results = Results()
    pl.seed_everything(SEED, verbose=False)
    model, recorder, data = Model(case), Recorder(directory), Data(case, kind)
    epochs = case.max_epochs
    trainer = trainer_of(case, kind, directory, recorder, epochs)
    for number, stage in enumerate(("fit", *case.later)):
        recorder.number = number
        if stage == "fit":
            trainer.fit_loop.max_epochs = epochs
            epochs += 1
            returned = trainer.fit(model, datamodule=data)
        elif stage == "resume":
            path = directory / f"saved-{number}.ckpt"
            trainer.save_checkpoint(path)
            pl.seed_everything(SEED, verbose=False)
            model, recorder = Model(case), Recorder(directory)
            recorder.number = number
            trainer = trainer_of(case, kind, directory, recorder, epochs)
            epochs += 1
            returned = trainer.fit(model, datamodule=data, ckpt_path=path, **LOADS_EVERYTHING)
        else:
            verbose = {} if stage == "predict" else {"verbose": False}
            returned = getattr(trainer, stage)(model, datamodule=data, **verbose)
        results.returned.append(returned)
        results.states.append(state_of(trainer, model))
    return results
