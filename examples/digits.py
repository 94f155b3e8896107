"""Trains a small convolutional network on real handwritten digits with any strategy, and prints accuracy and speed.

    python examples/digits.py                          # strategy="ddp_ext", two CPU processes
    python examples/digits.py --strategy ddp           # Lightning's own strategy, for comparison
    torchrun --nproc-per-node 2 examples/digits.py     # torchrun starts the ranks

The data are the 1,797 images of scikit-learn's digits dataset (8 x 8 pixels, ten classes; a copy of the test set of the
UCI ML hand-written digits datasets). The script does not import ``lightning_strategies_ext``: Lightning loads it.
"""

import argparse
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

NUM_HELD_OUT = 360


class DigitsData(pl.LightningDataModule):
    """The digits, with a fixed split into training and held-out images.

    Args:
        batch_size: Images per process and step.
    """

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size
        images, labels = load_digits(return_X_y=True)
        split = train_test_split(images, labels, test_size=NUM_HELD_OUT, random_state=0, stratify=labels)
        tensors = [torch.as_tensor(array) for array in split]
        train_x, held_out_x = (x.float().div(16.0).view(-1, 1, 8, 8) for x in tensors[:2])
        self.train_set = TensorDataset(train_x, tensors[2])
        self.held_out_set = TensorDataset(held_out_x, tensors[3])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Returns a loader of shuffled training images."""
        return DataLoader(self.train_set, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Returns a loader of held-out images."""
        return DataLoader(self.held_out_set, self.batch_size)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Returns a loader of held-out images."""
        return self.val_dataloader()


class DigitsNet(pl.LightningModule):
    """Two convolutions with batch normalization, then a linear classifier: 20,554 parameters.

    Args:
        lr: Learning rate of Adam.
    """

    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(256, 10),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the cross entropy of one batch, and logs it."""
        images, labels = batch
        loss = functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs the accuracy on held-out images."""
        self.log("val_accuracy", self._accuracy(batch), prog_bar=True, sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs the accuracy on held-out images."""
        self.log("test_accuracy", self._accuracy(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer, Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def _accuracy(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return (self.net(images).argmax(dim=1) == labels).float().mean()


class Throughput(Callback):
    """Measures training images per second over all processes, without the start and the validation of epochs."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_images = 0
        self._started = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch, batch_idx: int) -> None:  # type: ignore[no-untyped-def]
        """Starts the clock."""
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs, batch, batch_idx: int
    ) -> None:  # type: ignore[no-untyped-def]
        """Stops the clock."""
        self.seconds += time.perf_counter() - self._started
        self.num_images += len(batch[0]) * trainer.world_size


def main() -> None:
    """Trains, tests, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="ddp_ext", help="any name that Trainer(strategy=...) accepts")
    parser.add_argument("--devices", type=int, default=2, help="processes per host")
    parser.add_argument("--num-nodes", type=int, default=1, help="hosts")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--dir", type=Path, default=Path("checkpoints"), help="directory of the checkpoint")
    arguments = parser.parse_args()

    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data are in memory
    pl.seed_everything(1, verbose=False)
    checkpoint = ModelCheckpoint(
        arguments.dir, "digits", monitor="val_accuracy", mode="max", enable_version_counter=False
    )
    throughput = Throughput()
    trainer = pl.Trainer(
        strategy=arguments.strategy,
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        num_nodes=arguments.num_nodes,
        max_epochs=arguments.epochs,
        callbacks=[checkpoint, throughput],
        logger=False,
        enable_model_summary=False,
    )
    data, model = DigitsData(arguments.batch_size), DigitsNet()
    trainer.fit(model, data)
    accuracy = trainer.test(model, data, verbose=False)[0]["test_accuracy"]

    if trainer.is_global_zero:
        table = Table(title="Handwritten digits")
        table.add_column("what")
        table.add_column("value", justify="right")
        table.add_row("strategy", arguments.strategy)
        table.add_row("processes", str(trainer.world_size))
        table.add_row("training steps", str(trainer.global_step))
        table.add_row(f"accuracy on {NUM_HELD_OUT} held-out images", f"{accuracy:.4f}")
        table.add_row("training images per second", f"{throughput.num_images / throughput.seconds:,.0f}")
        table.add_row("best checkpoint", str(Path(checkpoint.best_model_path)))
        Console().print(table)


if __name__ == "__main__":
    main()
