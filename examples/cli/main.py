"""Tells malignant from benign tumours with LightningCLI; the strategy is a line of the YAML file.

    python examples/cli/main.py fit --config examples/cli/ddp_ext.yaml
    python examples/cli/main.py fit --config examples/cli/ddp_ext.yaml --config examples/cli/arguments.yaml
    python examples/cli/main.py fit --config examples/cli/ddp_ext.yaml --trainer.strategy ddp_spawn_ext
    python examples/cli/main.py test --config examples/cli/ddp_ext.yaml --ckpt_path checkpoints/tumours.ckpt

The second adds a file in which the strategy is a class with arguments. The data are 569 rows of 30 measurements that
come inside scikit-learn (the Breast Cancer Wisconsin diagnostic dataset).
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


class Tumours(pl.LightningDataModule):
    """The measurements, each with mean 0 and variance 1 over the training set, and 0 for malignant or 1 for benign.

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
        """Shuffled training rows."""
        return DataLoader(self.train_set, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Held-out rows."""
        return DataLoader(self.held_out_set, self.batch_size)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Held-out rows."""
        return self.val_dataloader()


class Classifier(pl.LightningModule):
    """Fully connected layers; the optimizer is LightningCLI's.

    Args:
        widths: Widths of the hidden layers.
        dropout: Share of the hidden units that a training step leaves out.
    """

    def __init__(self, widths: list[int], dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, width in zip([30, *widths], widths, strict=False):
            layers += [nn.Linear(before, width), nn.ReLU(), nn.Dropout(dropout)]
        self.net = nn.Sequential(*layers, nn.Linear(widths[-1], 2))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy of one batch."""
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
    """Does what the command line says, and reports what it has measured."""
    cli = LightningCLI(Classifier, Tumours)
    if cli.subcommand == "fit" and cli.trainer.is_global_zero:  # of the others Lightning prints what was measured
        table = Table("what", "value", title="Tumours")
        table.add_row("strategy", type(cli.trainer.strategy).__name__)
        table.add_row("processes", str(cli.trainer.world_size))
        table.add_row("training steps", str(cli.trainer.global_step))
        for name, value in cli.trainer.callback_metrics.items():
            table.add_row(name, f"{value:.4f}")
        Console().print(table)


if __name__ == "__main__":
    main()
