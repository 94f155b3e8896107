"""Script of the contenders of :mod:`benchmarks.rank_loss` that use a Trainer: a training script that records steps."""

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy as StockStrategy
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks import names
from benchmarks.contenders import silence_lightning
from benchmarks.rank_loss_training import BATCH_SIZE, LEARNING_RATE, NUM_RANKS, RESTARTED, SPAWN, Job, Numbered, StepLog

Batch = tuple[Tensor, Tensor]


class Layers(pl.LightningModule):
    """Linear layers. The rank records its steps, and may kill itself.

    Args:
        job: The run.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.net = job.net()
        self.step_log: StepLog | None = None

    def on_train_start(self) -> None:
        """Starts a record, also after the ranks of an elastic strategy have changed."""
        self.step_log = StepLog(self.job)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns a loss, unless the rank kills itself."""
        assert self.step_log is not None
        self.step_log.exit_if_due(self.global_rank, self.trainer.global_step)
        loss: Tensor = self.net(batch[1]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns Adam, whose state has twice the size of the parameters."""
        return torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)


class StepRecorder(pl.Callback):
    """Records steps. The time of a step ends before a ModelCheckpoint, the last callback, writes a file."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Records the step."""
        assert isinstance(pl_module, Layers)
        assert pl_module.step_log is not None
        pl_module.step_log.step(trainer.global_step, trainer.global_rank, trainer.world_size, batch[0])


class TimedStock(StockStrategy):
    """Lightning's ``ddp``, which records the time of loading a checkpoint.

    Args:
        job: The run.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.file = Path(job.directory, "loading")

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads the file, and records the time."""
        started = time.monotonic()
        checkpoint = super().load_checkpoint(*args, **kwargs)
        self.record(started)
        return checkpoint

    def load_model_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model, and records the time."""
        started = time.monotonic()
        super().load_model_state_dict(*args, **kwargs)
        self.record(started)

    def load_optimizer_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads the optimizer, and records the time."""
        started = time.monotonic()
        super().load_optimizer_state_dict(*args, **kwargs)
        self.record(started)

    def record(self, started: float) -> None:
        """Records the time of a part of the loading, on rank 0."""
        if self.global_rank == 0:
            with self.file.open("a") as file:
                file.write(f"{time.monotonic() - started}\n")


def make_strategy(job: Job) -> Strategy:
    """Returns the strategy of a contender."""
    if job.contender == SPAWN:
        return names.DDPSpawnStrategy(elastic=True, commit_every_n_steps=job.interval)
    if job.contender == RESTARTED:
        return names.DDPElasticStrategy(commit_every_n_steps=job.interval)
    return TimedStock(job)


def main() -> None:
    """Trains for an epoch."""
    job = Job.this_process()
    silence_lightning()
    strategy = make_strategy(job)
    is_stock = isinstance(strategy, TimedStock)
    # One file, which is overwritten: the cheapest setting of stock.
    saving = ModelCheckpoint(job.directory, every_n_train_steps=job.interval, save_top_k=0, save_last=True)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=NUM_RANKS,
        max_epochs=1,
        logger=False,
        enable_checkpointing=is_stock,
        callbacks=[StepRecorder(), saving] if is_stock else [StepRecorder()],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.directory,
    )
    data = DataLoader(Numbered(job.num_samples), BATCH_SIZE, shuffle=True)
    # Without a checkpoint, stock starts from the beginning.
    trainer.fit(Layers(job), data, ckpt_path="last" if is_stock else None)


if __name__ == "__main__":
    main()
