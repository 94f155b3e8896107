"""Training on ranks that have different numbers of batches, and the same training in one process.

trained = train(strategy_of("gloo", "join"), (5, 3), "counted", Model)  # on each of two ranks
torch.testing.assert_close(trained["weights"], reference("join", (5, 3), "counted"))
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric, SumMetric

from lightning_strategies_ext import DDPStrategy, HorovodStrategy
from tests.support.models import make_trainer

BATCH_SIZE = 4
NUM_EPOCHS = 2
#: Batches of rank 0 and of rank 1.
LENGTHS = {"second is short": (5, 3), "first is short": (3, 7), "even": (4, 4)}
KINDS = ["counted", "streamed"]


def sample(rank: int, index: int) -> tuple[Tensor, int]:
    generator = torch.Generator().manual_seed(1000 * rank + index)
    features = torch.randn(6, generator=generator)
    return features, int(features[:3].argmax())


def batch_of(rank: int, index: int) -> tuple[Tensor, Tensor]:
    """Features of shape ``(BATCH_SIZE, 6)``, and labels of shape ``(BATCH_SIZE,)``."""
    samples = [sample(rank, index * BATCH_SIZE + place) for place in range(BATCH_SIZE)]
    return torch.stack([features for features, _ in samples]), torch.tensor([label for _, label in samples])


class Counted(Dataset):
    def __init__(self, rank: int, num_batches: int) -> None:
        self.rank = rank
        self.num_samples = num_batches * BATCH_SIZE

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return sample(self.rank, index)


class Streamed(IterableDataset):
    def __init__(self, rank: int, num_batches: int) -> None:
        self.samples = Counted(rank, num_batches)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return (self.samples[index] for index in range(len(self.samples)))


def loader(rank: int, num_batches: int, kind: str) -> DataLoader:
    data = Counted(rank, num_batches) if kind == "counted" else Streamed(rank, num_batches)
    return DataLoader(data, batch_size=BATCH_SIZE)


class Model(pl.LightningModule):
    """Logs, counts and synchronises in every way that a shadowing rank could spoil."""

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
    """Steps twice per batch."""

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


class AddsUp(Model):
    """Steps after three batches, of which the gradients of the first travel with those of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        with self.trainer.strategy.block_backward_sync() if batch_idx % 3 == 0 else nullcontext():
            self.manual_backward(loss)
        if batch_idx % 3 == 2:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def on_train_epoch_end(self) -> None:
        pass


class Normalized(Model):
    """Its backward pass wants the buffers of the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class LaterEven(Model):
    """Has as many batches on all ranks in its second epoch."""

    def train_dataloader(self) -> Any:
        return loader(self.global_rank, 4, "counted") if self.current_epoch else super().train_dataloader()


def strategy_of(engine: str, way: str, **kwargs: Any) -> Any:
    """By name: "horovod", or a backend of torch.distributed."""
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
    """Trains on this rank, which has as many batches per epoch as its place in the lengths says."""
    devices = "auto" if isinstance(strategy, HorovodStrategy) else len(lengths)
    own = {"devices": devices, "use_distributed_sampler": False, "num_sanity_val_steps": 2, **(options or {})}
    trainer = make_trainer(strategy, **{"max_epochs": NUM_EPOCHS, **own})
    model = make_model()
    model.lengths, model.kind = lengths, kind
    trainer.fit(model, val_dataloaders=DataLoader(Counted(9, 2), batch_size=BATCH_SIZE))
    return {
        "weights": {name: value.clone() for name, value in model.net.state_dict().items()},
        "num_seen": model.num_seen.item(),
        "global_step": trainer.global_step,
        "steps": model.steps,
        "num_validated": model.num_validated,
        "logged": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
    }


CASES = {
    (way, name, kind, accumulate): {"accumulate_grad_batches": accumulate}
    for way in ("stop", "join")
    for name in LENGTHS
    for kind in KINDS
    for accumulate in (1, 2)
}
CASES |= {
    ("error", "even", kind, accumulate): {"accumulate_grad_batches": accumulate}
    for kind in KINDS
    for accumulate in (1, 3)
}


def train_all(engine: str, directory: str) -> dict[Any, Any]:
    """All cases, on one rank."""

    def trained(way: str, *args: Any) -> dict[str, Any]:
        return train(strategy_of(engine, way), *args)

    results: dict[Any, Any] = {
        case: trained(case[0], LENGTHS[case[1]], case[2], Model, options) for case, options in CASES.items()
    }
    for kind in KINDS:
        results["manual", kind] = trained("join", (5, 3), kind, Manual)
        saving = ModelCheckpoint(directory, f"{kind}-{{step}}", every_n_train_steps=2, save_top_k=-1)
        options = {"enable_checkpointing": True, "callbacks": [saving], "val_check_interval": 2, "max_epochs": 1}
        results["checkpoints", kind] = trained("join", (6, 3), kind, Model, options)
    for kind in KINDS:
        results["batch norm", kind] = trained("join", (3, 5), kind, Normalized)
    for length in (4, 5):
        results["adds up", length] = trained("join", (length, 6), "counted", AddsUp, {"max_epochs": 1})
    results["later even"] = trained("join", (5, 3), "counted", LaterEven, {"reload_dataloaders_every_n_epochs": 1})
    results["half epochs"] = trained("join", (6, 3), "counted", Model, {"val_check_interval": 0.5, "max_epochs": 1})
    results["not reached"] = trained("error", (5, 7), "counted", Model, {"max_steps": 4})
    return results


def reference(
    way: str,
    lengths: tuple[int, ...],
    kind: str,
    accumulate: int = 1,
    later: tuple[int, ...] | None = None,
    num_steps: int = 1,
) -> dict[str, Tensor]:
    """Weights of one process that goes through the batches of all ranks, of which there may be others later.

    Steps so many times with the same batches each time.
    """
    model = Model()
    (optimizer,), (scheduler,) = model.configure_optimizers()
    for epoch in range(NUM_EPOCHS):
        lengths = lengths if epoch == 0 or later is None else later
        num_batches = min(lengths) if way == "stop" else max(lengths)
        if kind == "streamed":  # the end of an epoch is known at optimizer steps
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
