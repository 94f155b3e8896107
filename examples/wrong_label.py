"""Trains on two CPU ranks with one wrong label in the data, so that one rank raises an exception.

    python examples/wrong_label.py                   # the output ends with this package's failure report
    python examples/wrong_label.py --strategy ddp    # Lightning's strategy prints the traceback of each rank

In both cases the exit code is 1.
"""

import argparse

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

NUM_CLASSES = 10
#: Index of the sample with the wrong label. With the seed below, rank 1 receives it in step 10.
WRONG_SAMPLE = 337


class Net(pl.LightningModule):
    """A linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, NUM_CLASSES)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the loss of one batch."""
        features, labels = batch
        return self.loss(self.layer(features), labels)

    def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Returns the cross entropy. Raises an IndexError for a label that is not a class."""
        return torch.nn.functional.cross_entropy(scores, labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer, plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    """Trains on two CPU ranks until the wrong label is reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="ddp_ext")
    arguments = parser.parse_args()

    pl.seed_everything(1, verbose=False)
    labels = torch.arange(640) % NUM_CLASSES
    labels[WRONG_SAMPLE] = NUM_CLASSES
    data = TensorDataset(torch.randn(len(labels), 8), labels)
    trainer = pl.Trainer(
        strategy=arguments.strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(data, batch_size=16))


if __name__ == "__main__":
    main()
