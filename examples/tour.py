"""Trains the same network on one device, with Lightning's strategy, and with a strategy of this package.

    python examples/tour.py                            # strategy="ddp_spawn_ext"
    python examples/tour.py --strategy ddp_ext         # or another strategy of this package

Two CPU ranks, each with half of every batch, compute the same result as one device with whole batches. The printed
table compares the state of the script after the training: metrics, counters of the module and of a callback,
optimizers, and predictions. The images are the digits of ``examples/digits.py``.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchmetrics.classification import MulticlassAccuracy

if __package__:
    from examples.digits import DigitsData
else:
    from digits import DigitsData

BATCH_SIZE = 64
NUM_BATCHES = 22
NUM_EPOCHS = 6
ONE_DEVICE = "one device"
#: Lightning's counterpart of each strategy, or None.
STOCK = {
    "ddp_ext": "ddp",
    "ddp_spawn_ext": "ddp_spawn",
    "ddp_fork_ext": "ddp_fork",
    "ddp_notebook_ext": "ddp_notebook",
    "dp_ext": None,
    "horovod_ext": None,
}


class Net(pl.LightningModule):
    """A network with one hidden layer, which counts its batches and measures accuracy with a torchmetrics metric."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")
        self.num_batches = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the cross entropy of one batch, and logs it."""
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        """Counts the batch."""
        self.num_batches += 1

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs the loss and the accuracy on held-out images."""
        logits = self.net(batch[0])
        self.accuracy(logits, batch[1])
        self.log("held-out loss", functional.cross_entropy(logits, batch[1]), sync_dist=True)
        self.log("held-out accuracy", self.accuracy)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs the same metrics as ``validation_step``."""
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the most probable digit of each image."""
        return self.net(batch[0]).argmax(dim=1)

    def configure_optimizers(self) -> Any:
        """Returns Adam, and a schedule that halves the learning rate after every second epoch."""
        optimizer = torch.optim.Adam(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)]


class Data(DigitsData):
    """The digits, in global batches that are the same for each number of ranks."""

    def train_dataloader(self) -> DataLoader[Any]:
        """Returns a loader of this rank's training images."""
        assert self.trainer is not None
        ranks = self.trainer.world_size
        images = Subset(self.train_set, range(NUM_BATCHES * BATCH_SIZE))
        sampler = DistributedSampler(images, ranks, self.trainer.global_rank, shuffle=False) if ranks > 1 else None
        return DataLoader(images, batch_size=BATCH_SIZE // ranks, sampler=sampler)

    def val_dataloader(self) -> DataLoader[Any]:
        """Returns a loader of held-out images; the Trainer distributes them over the ranks."""
        assert self.trainer is not None
        return DataLoader(self.held_out_set, batch_size=60 // self.trainer.world_size)

    def predict_dataloader(self) -> DataLoader[Any]:
        """Returns the loader of ``val_dataloader``."""
        return self.val_dataloader()


class Epochs(Callback):
    """Appends the number of each epoch to a list of the caller."""

    def __init__(self, epochs: list[int]) -> None:
        self.epochs = epochs

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Appends the number of the epoch."""
        self.epochs.append(trainer.current_epoch)


def observe(strategy: str | None, output: Path) -> None:
    """Trains, tests, and predicts, then writes the state of the process of rank 0 to a JSON file."""
    pl.seed_everything(1, verbose=False)
    epochs: list[int] = []
    model, data = Net(), Data()
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if strategy is None or "horovod" in strategy else 2,
        strategy=strategy or "auto",
        max_epochs=NUM_EPOCHS,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        callbacks=[Epochs(epochs)],
        **quiet,
    )
    seen: dict[str, Any] = {}
    trainer.fit(model, data)
    seen.update({name: trainer.callback_metrics[name].item() for name in ("held-out loss", "held-out accuracy")})
    seen["global step"] = trainer.global_step
    seen["batches that the module counted"] = model.num_batches
    seen["epochs in the callback's list"] = len(epochs)
    has_state = trainer.optimizers and trainer.optimizers[0].state
    seen["Adam's steps"] = int(next(iter(trainer.optimizers[0].state.values()))["step"]) if has_state else "lost"
    seen["learning rate"] = trainer.optimizers[0].param_groups[0]["lr"] if has_state else "lost"
    seen["size of the weights"] = sum(float(p.detach().square().sum()) for p in model.parameters()) ** 0.5
    seen["accuracy by trainer.test"] = trainer.test(model, data, verbose=False)[0]["held-out accuracy"]
    labels = data.held_out_set.tensors[1]
    predicted = torch.cat([torch.empty(0), *(trainer.predict(model, data) or [])])  # type: ignore[list-item]
    is_whole = len(predicted) == len(labels)
    seen["predictions in the script"] = len(predicted)
    seen["accuracy of predictions"] = float((predicted == labels).float().mean()) if is_whole else "incomplete"
    if trainer.is_global_zero:
        output.write_text(json.dumps(seen))


def run(strategy: str | None) -> dict[str, Any]:
    """Runs ``observe`` in a new process, and returns the state that it has written.

    Raises:
        RuntimeError: If the process fails.
    """
    launcher = (
        [str(Path(sys.executable).parent / "horovodrun"), "-np", "2", "--gloo"] if strategy == "horovod_ext" else []
    )
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory, "seen.json")
        command = [*launcher, sys.executable, __file__, "--observe", str(output), "--strategy", strategy or ONE_DEVICE]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode != 0:
            raise RuntimeError(f"{strategy or ONE_DEVICE} exited with code {ended.returncode}:\n{ended.stderr}")
        return json.loads(output.read_text())  # type: ignore[no-any-return]


def value_text(value: Any) -> str:
    """Returns the text of a table cell."""
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def main() -> None:
    """Trains with each strategy, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="ddp_spawn_ext", help=f"one of {', '.join(STOCK)}")
    parser.add_argument("--observe", type=Path, help=argparse.SUPPRESS)  # set by `run`
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*(num_workers|DistributedSampler|LeafSpec|litlogger).*")
    if arguments.observe:
        observe(None if arguments.strategy == ONE_DEVICE else arguments.strategy, arguments.observe)
        return
    if arguments.strategy not in STOCK:
        parser.error(f"--strategy {arguments.strategy} is not one of {', '.join(STOCK)}")
    columns = {ONE_DEVICE: run(None)}
    stock = STOCK[arguments.strategy]
    if stock is not None:
        columns[stock] = run(stock)
    columns[arguments.strategy] = run(arguments.strategy)
    table = Table("after fit, test and predict", *columns, title="Results")
    for row in columns[ONE_DEVICE]:
        table.add_row(row, *(value_text(column[row]) for column in columns.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
