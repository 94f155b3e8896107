"""Classifies tumors as malignant or benign with LightningCLI; a line of the YAML file selects the strategy.

    python examples/cli/main.py fit --config examples/cli/ddp_ext.yaml
    python examples/cli/main.py fit --config examples/cli/ddp_ext.yaml --config examples/cli/arguments.yaml
    python examples/cli/main.py fit --config examples/cli/ddp_ext.yaml --trainer.strategy ddp_spawn_ext
    python examples/cli/main.py test --config examples/cli/ddp_ext.yaml --ckpt_path checkpoints/tumors.ckpt

In the second command, another file selects the strategy as a class with arguments. The data are the 569 rows of 30
measurements of scikit-learn's breast cancer dataset (the Breast Cancer Wisconsin diagnostic dataset).
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Tumors(pl.LightningDataModule):
    """Measurements, normalized to mean 0 and variance 1 over the training set, and labels (0 malignant, 1 benign).

    Args:
        batch_size: Rows per process and step.
    """

    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size
        rows, labels = load_breast_cancer(return_X_y=True)
        split = train_test_split(rows, labels, test_size=0.25, random_state=0, stratify=labels)
        train_rows, held_out_rows, train_labels, held_out_labels = (torch.as_tensor(array) for array in split)
        mean, deviation = train_rows.mean(dim=0), train_rows.std(dim=0)
        self.train_set = TensorDataset(((train_rows - mean) / deviation).float(), train_labels)
        self.held_out_set = TensorDataset(((held_out_rows - mean) / deviation).float(), held_out_labels)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Returns a loader of shuffled training rows."""
        return DataLoader(self.train_set, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Returns a loader of held-out rows."""
        return DataLoader(self.held_out_set, self.batch_size)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Returns a loader of held-out rows."""
        return self.val_dataloader()


class Classifier(pl.LightningModule):
    """A network of fully connected layers. LightningCLI configures the optimizer.

    Args:
        widths: Widths of the hidden layers.
        dropout: Fraction of the hidden units that a training step sets to zero.
    """

    def __init__(self, widths: list[int], dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, width in zip([30, *widths], widths, strict=False):
            layers += [nn.Linear(before, width), nn.ReLU(), nn.Dropout(dropout)]
        self.net = nn.Sequential(*layers, nn.Linear(widths[-1], 2))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the cross entropy of one batch, and logs it."""
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs the accuracy on held-out rows."""
        self.log("held_out_accuracy", self._accuracy(batch), prog_bar=True, sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs the accuracy on held-out rows."""
        self.log("test_accuracy", self._accuracy(batch), sync_dist=True)

    def _accuracy(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.net(batch[0]).argmax(dim=1) == batch[1]).float().mean()


def main() -> None:
    """Runs the command line, and prints the metrics after ``fit``."""
    cli = LightningCLI(Classifier, Tumors)
    if cli.subcommand == "fit" and cli.trainer.is_global_zero:  # Lightning prints the metrics of the other subcommands
        table = Table("what", "value", title="Tumors")
        table.add_row("strategy", type(cli.trainer.strategy).__name__)
        table.add_row("processes", str(cli.trainer.world_size))
        table.add_row("training steps", str(cli.trainer.global_step))
        for name, value in cli.trainer.callback_metrics.items():
            table.add_row(name, f"{value:.4f}")
        Console().print(table)


if __name__ == "__main__":
    main()
