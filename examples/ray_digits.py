"""Trains on the handwritten digits of ``examples/digits.py`` in Ray workers, on this machine or on a cluster.

    python examples/ray_digits.py                                        # starts Ray for the duration of the script
    python examples/ray_digits.py --address auto --workers 8             # on a host of a cluster
    ray job submit --working-dir examples -- python ray_digits.py --workers 8    # from another machine

After each stage, this process has the results of all workers: the weights, the metrics of rank 0, and the predictions.
"""

import argparse
import os
import socket
import warnings

import lightning.pytorch as pl
import torch
from digits import NUM_HELD_OUT, DigitsData, DigitsNet
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_strategies_ext import DDPRayStrategy


class Net(DigitsNet):
    """The network of ``digits.py``, with predictions. The class is pickled, since workers cannot import the script."""

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the most probable digit of each image."""
        return self.net(batch[0]).argmax(dim=1)


class PrintProcesses(Callback):
    """Prints the process ID and the host of each rank."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prints one line in each worker; Ray forwards the line to the output of the script."""
        print(f"rank {trainer.global_rank} of {trainer.world_size} is process {os.getpid()} on {socket.gethostname()}")


def main() -> None:
    """Trains, tests, predicts, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cpus", type=float, default=1, help="CPUs per worker")
    parser.add_argument("--placement", default="PACK", help="PACK, or SPREAD for as many hosts as possible")
    parser.add_argument("--address", help="address of the cluster; auto for the cluster of this machine")
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data are in memory
    pl.seed_everything(1, verbose=False)
    strategy = DDPRayStrategy(
        num_workers=arguments.workers,
        num_cpus_per_worker=arguments.cpus,
        placement_strategy=arguments.placement,
        address=arguments.address,
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=arguments.epochs,
        callbacks=[PrintProcesses()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    data, model = DigitsData(), Net()
    trainer.fit(model, data)
    num_steps = trainer.global_step
    accuracy = trainer.test(model, data, verbose=False)[0]["test_accuracy"]
    predicted = torch.cat(trainer.predict(model, data.test_dataloader()))
    right = int((predicted == data.held_out_set.tensors[1]).sum())

    table = Table(title="Handwritten digits, on Ray")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row("workers", str(arguments.workers))
    table.add_row("training steps", str(num_steps))
    table.add_row(f"accuracy on {NUM_HELD_OUT} held-out images", f"{accuracy:.4f}")
    table.add_row("correct predictions", str(right))
    Console().print(table)


if __name__ == "__main__":
    main()
