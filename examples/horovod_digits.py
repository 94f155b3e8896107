r"""Trains on the handwritten digits of ``examples/digits.py`` over Horovod, also with ranks that join and leave.

    horovodrun --gloo -np 2 python examples/horovod_digits.py
    python examples/horovod_digits.py --devices 2                  # the script starts the two ranks itself

    horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script examples/horovod_hosts.sh \
        python examples/horovod_digits.py --elastic --epochs 100

With ``--elastic``, ranks may fail, leave, and join during the training. Each rank prints its process ID after its
first step. Kill one rank, and the other ranks continue. Add a host to the file that ``examples/horovod_hosts.sh``
reads, and a rank joins.
"""

import argparse
import os
import warnings
from typing import Any

import lightning.pytorch as pl
from digits import NUM_HELD_OUT, DigitsData, DigitsNet
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table

from lightning_strategies_ext import HorovodStrategy, KeepGlobalBatch


class Worlds(Callback):
    """Records the number of ranks at the start and after each change, and prints the process ID of each rank."""

    def __init__(self) -> None:
        self.num_ranks: list[int] = []
        self._has_printed = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Records the number of ranks. Elastic training calls it again after ranks have left or joined."""
        self.num_ranks.append(trainer.world_size)
        self._has_printed = False

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Prints the process ID after the first step: from then on, the other ranks can restore a commit."""
        if not self._has_printed:
            self._has_printed = True
            print(f"rank {trainer.global_rank} of {trainer.world_size} is process {os.getpid()}", flush=True)


def main() -> None:
    """Trains, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elastic", action="store_true", help="ranks may join and leave")
    parser.add_argument("--devices", type=int, default=1, help="number of ranks to start, without horovodrun")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    arguments = parser.parse_args()

    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data are in memory
    pl.seed_everything(1, verbose=False)
    worlds = Worlds()
    trainer = pl.Trainer(
        # A failure of a rank loses the steps since the last commit, here at most 20. The name "horovod_elastic_ext"
        # selects the same strategy with a commit every 100 steps.
        strategy=HorovodStrategy(elastic=True, commit_every_n_steps=20) if arguments.elastic else "horovod_ext",
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        max_epochs=arguments.epochs,
        # The callback keeps the number of images per step constant when the number of ranks changes.
        callbacks=[worlds, *([KeepGlobalBatch()] if arguments.elastic else [])],
        enable_progress_bar=not arguments.elastic,  # the progress bars of two ranks would overwrite each other
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    data, model = DigitsData(arguments.batch_size), DigitsNet()
    trainer.fit(model, data)

    if trainer.is_global_zero:
        table = Table("what", title="Handwritten digits, over Horovod")
        table.add_column("value", justify="right")
        table.add_row("ranks in the course of training", ", ".join(map(str, worlds.num_ranks)))
        table.add_row("training steps", str(trainer.global_step))
        table.add_row(f"accuracy on {NUM_HELD_OUT} held-out images", f"{trainer.callback_metrics['val_accuracy']:.4f}")
        Console().print(table)


if __name__ == "__main__":
    main()
