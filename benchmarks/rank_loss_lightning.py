"""The script of those contenders of :mod:`benchmarks.rank_loss` that use a Trainer: a user's, which writes notes."""

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
from benchmarks.rank_loss_training import BATCH_SIZE, LEARNING_RATE, NUM_RANKS, RESTARTED, SPAWN, Job, Notes, Numbered

Batch = tuple[Tensor, Tensor]


class Layers(pl.LightningModule):
    """Linear layers; the rank writes notes, and may die.

    Args:
        job: The run.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.net = job.net()
        self.notes: Notes | None = None

    def on_train_start(self) -> None:
        """Begins the notes; again when the ranks of an elastic strategy have changed."""
        self.notes = Notes(self.job)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Some loss, unless the rank dies."""
        assert self.notes is not None
        self.notes.die_if_due(self.global_rank, self.trainer.global_step)
        loss: Tensor = self.net(batch[1]).square().mean()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Notes the step."""
        assert self.notes is not None
        self.notes.step(self.trainer.global_step, self.global_rank, self.trainer.world_size, batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, with twice as much state as there are parameters."""
        return torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)


class TimedStock(StockStrategy):
    """Lightning's ``ddp``, which writes down how long it takes to load a checkpoint.

    Args:
        job: The run.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.file = Path(job.directory, "loading")

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads the file."""
        started = time.monotonic()
        checkpoint = super().load_checkpoint(*args, **kwargs)
        self.note(started)
        return checkpoint

    def load_model_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Fills the model."""
        started = time.monotonic()
        super().load_model_state_dict(*args, **kwargs)
        self.note(started)

    def load_optimizer_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Fills the optimizer."""
        started = time.monotonic()
        super().load_optimizer_state_dict(*args, **kwargs)
        self.note(started)

    def note(self, started: float) -> None:
        """Adds the time of a part of it, on rank 0."""
        if self.global_rank == 0:
            with self.file.open("a") as file:
                file.write(f"{time.monotonic() - started}\n")


def make_strategy(job: Job) -> Strategy:
    """The strategy of a contender."""
    if job.contender == SPAWN:
        return names.DDPSpawnStrategy(elastic=True, commit_every_n_steps=job.interval)
    if job.contender == RESTARTED:
        return names.DDPElasticStrategy(commit_every_n_steps=job.interval)
    return TimedStock(job)


def main() -> None:
    """Trains an epoch."""
    job = Job.of_this_process()
    silence_lightning()
    strategy = make_strategy(job)
    is_stock = isinstance(strategy, TimedStock)
    # One file, written over: the cheapest that stock can do.
    saving = ModelCheckpoint(job.directory, every_n_train_steps=job.interval, save_top_k=0, save_last=True)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=NUM_RANKS,
        max_epochs=1,
        logger=False,
        enable_checkpointing=is_stock,
        callbacks=[saving] if is_stock else [],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.directory,
    )
    data = DataLoader(Numbered(job.num_samples), BATCH_SIZE, shuffle=True)
    # Stock begins anew if there is no checkpoint yet.
    trainer.fit(Layers(job), data, ckpt_path="last" if is_stock else None)


if __name__ == "__main__":
    main()
