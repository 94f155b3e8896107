"""Trains a model on ranks with different numbers of batches, and trains the same model in one process.

trained = train(strategy_of("gloo", "join"), (5, 3), "counted", Model)  # on each of two ranks
torch.testing.assert_close(trained["weights"], reference("join", (5, 3), "counted"))
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric, SumMetric

from lightning_strategies_ext import DDPStrategy, HorovodStrategy
from tests.support.models import make_trainer

BATCH_SIZE = 4
NUM_EPOCHS = 2
#: Numbers of batches of rank 0 and of rank 1.
LENGTHS = {"second is short": (5, 3), "first is short": (3, 7), "even": (4, 4)}
#: Whether the DataLoader knows its length.
KINDS = ["counted", "streamed"]


def sample(rank: int, index: int) -> tuple[Tensor, int]:
    generator = torch.Generator().manual_seed(1000 * rank + index)
    features = torch.randn(6, generator=generator)
    return features, int(features[:3].argmax())


def batch_of(rank: int, index: int) -> tuple[Tensor, Tensor]:
    """Returns features of shape ``(BATCH_SIZE, 6)``, and labels of shape ``(BATCH_SIZE,)``."""
    features, labels = zip(
        *(sample(rank, index * BATCH_SIZE + position) for position in range(BATCH_SIZE)), strict=True
    )
    return torch.stack(features), torch.tensor(labels)


class Streamed(IterableDataset):
    def __init__(self, samples: list[tuple[Tensor, int]]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return iter(self.samples)


def loader(rank: int, num_batches: int, kind: str) -> DataLoader:
    samples: Any = [sample(rank, index) for index in range(num_batches * BATCH_SIZE)]
    return DataLoader(samples if kind == "counted" else Streamed(samples), batch_size=BATCH_SIZE)


class Model(pl.LightningModule):
    """A model that logs, counts, and reduces; a shadowing rank could change each result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.mean_feature, self.num_samples = MeanMetric(), SumMetric()
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))
        self.steps: list[tuple[float, float, float]] = []
        self.num_validated: list[int] = []
        self.lengths: tuple[int, ...] = ()
        self.kind = ""

    def train_dataloader(self) -> DataLoader:
        return loader(self.global_rank, self.lengths[self.global_rank], self.kind)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        first = features[:, 0].mean()
        self.num_seen += len(features)
        self.mean_feature(features[:, 0])
        self.num_samples(len(features))
        self.log("num_samples", self.num_samples, on_epoch=True, on_step=False)
        self.log("feature", first, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(features))
        self.log("largest", features.max(), on_epoch=True, on_step=False, reduce_fx="max", sync_dist=True)
        self.steps.append(
            (
                self.trainer.strategy.reduce(first.clone()).item(),
                self.trainer.strategy.reduce(torch.tensor(1, device=self.device), reduce_op="sum").item(),
                self.trainer.strategy.reduce(first.clone(), reduce_op="min").item(),
            )
        )
        return functional.cross_entropy(self.net(features), labels)

    def on_train_epoch_end(self) -> None:
        self.log("mean_feature", self.mean_feature)

    def on_validation_start(self) -> None:
        self.num_validated.append(0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.num_validated[-1] += 1
        self.log("val_loss", functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Manual(Model):
    """Manual optimization with two steps per batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(functional.cross_entropy(self.net(batch[0]), batch[1]))
            optimizer.step()

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()


class Normalized(Model):
    """A model whose backward pass needs the buffers of the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def strategy_of(engine: str, way: str, **kwargs: Any) -> Any:
    """Returns the strategy of an engine: "horovod", or a backend of torch.distributed."""
    if engine == "horovod":
        return HorovodStrategy(uneven_inputs=way)
    return DDPStrategy(uneven_inputs=way, process_group_backend=engine, **kwargs)


def train(
    strategy: Any,
    lengths: tuple[int, ...],
    kind: str,
    make_model: Callable[[], Any],
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Trains on this rank; ``lengths`` has each rank's number of batches per epoch."""
    devices = "auto" if isinstance(strategy, HorovodStrategy) else len(lengths)
    own = {"devices": devices, "use_distributed_sampler": False, "num_sanity_val_steps": 2, **(options or {})}
    trainer = make_trainer(strategy, **{"max_epochs": NUM_EPOCHS, **own})
    model = make_model()
    model.lengths, model.kind = lengths, kind
    trainer.fit(model, val_dataloaders=loader(9, 2, "counted"))
    return {
        "weights": {name: value.clone() for name, value in model.net.state_dict().items()},
        "num_seen": model.num_seen.item(),
        "global_step": trainer.global_step,
        "steps": model.steps,
        "num_validated": model.num_validated,
        "logged": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
    }


def reference(
    way: str,
    lengths: tuple[int, ...],
    kind: str,
    accumulate: int = 1,
    later: tuple[int, ...] | None = None,
    num_steps: int = 1,
) -> dict[str, Tensor]:
    """Trains in one process on the batches of all ranks, and returns the weights.

    Args:
        way: The value of ``uneven_inputs``.
        lengths: Each rank's number of batches per epoch.
        kind: One of :data:`KINDS`.
        accumulate: Batches per optimizer step.
        later: Numbers of batches from the second epoch on, if they differ.
        num_steps: Optimizer steps with the same batches.
    """
    model = Model()
    (optimizer,), (scheduler,) = model.configure_optimizers()
    for epoch in range(NUM_EPOCHS):
        lengths = lengths if epoch == 0 or later is None else later
        num_batches = min(lengths) if way == "stop" else max(lengths)
        if kind == "streamed":  # ranks find the end of an epoch at optimizer steps
            num_batches = -(-num_batches // accumulate) * accumulate
        starts = range(0, num_batches, accumulate)
        for start in (start for start in starts for _ in range(num_steps)):
            gradients: list[list[Tensor]] = []
            for rank, length in enumerate(lengths):
                replica = deepcopy(model.net)
                replica.zero_grad()
                indices = range(start, min(start + accumulate, num_batches, length))
                for index in indices:
                    features, labels = batch_of(rank, index)
                    (functional.cross_entropy(replica(features), labels) / accumulate).backward()
                if indices:
                    gradients.append([parameter.grad for parameter in replica.parameters()])
            for parameter, *parts in zip(model.net.parameters(), *gradients, strict=True):
                parameter.grad = torch.stack(parts).mean(0)
            optimizer.step()
        scheduler.step()
    return model.net.state_dict()
