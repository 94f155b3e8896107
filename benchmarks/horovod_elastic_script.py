"""Script of :mod:`benchmarks.horovod_elastic`: trains a net, and records the time of each event.

python -m benchmarks.horovod_elastic_script DIRECTORY NUM_PARAMETERS NUM_STEPS COMMIT_EVERY KILL_AT
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import names
from benchmarks.contenders import silence_lightning

WIDTH = 1000
BATCH_SIZE = 32


class Wide(pl.LightningModule):
    """Linear layers of a million parameters each; one rank kills itself during the training."""

    def __init__(self, directory: Path, num_parameters: int, kill_at: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_parameters // WIDTH**2)))
        self.directory, self.kill_at = directory, kill_at

    def record(self, event: str, at: float | None = None) -> None:
        """Records an event at the current time, or at a given time."""
        line = {"what": event, "at": time.monotonic() if at is None else at, "step": self.trainer.global_step}
        with (self.directory / f"process{os.getpid()}").open("a") as file:
            file.write(json.dumps({**line, "rank": self.global_rank, "world": self.trainer.world_size}) + "\n")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Records the start of the batch, or kills the rank."""
        started = time.monotonic()
        killed = self.directory / "killed"
        if self.global_rank == 1 and self.trainer.global_step == self.kill_at and not killed.exists():
            killed.touch()
            self.record("kill")
            os.kill(os.getpid(), signal.SIGKILL)
        self.record("start", started)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Returns a loss."""
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Records the end of the batch."""
        self.record("end")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns Adam, whose state has twice the size of the parameters."""
        return torch.optim.Adam(self.parameters(), lr=1e-4)


def main() -> None:
    """Trains the net."""
    directory, (num_parameters, num_steps, commit_every, kill_at) = Path(sys.argv[1]), map(int, sys.argv[2:])
    silence_lightning()
    torch.set_num_threads(1)
    data = DataLoader(TensorDataset(torch.randn(BATCH_SIZE * 2 * num_steps, WIDTH)), BATCH_SIZE)
    trainer = pl.Trainer(
        strategy=names.HorovodStrategy(elastic=True, commit_every_n_steps=commit_every),
        accelerator="cpu",
        devices=1,
        max_steps=num_steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    trainer.fit(Wide(directory, num_parameters, kill_at), data)


if __name__ == "__main__":
    main()
