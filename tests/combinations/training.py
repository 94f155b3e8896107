"""The training of a cell: a small model, small data, and the observations of a rank after training."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, default_collate

from tests.combinations.features import Setup
from tests.support.models import LOADS_EVERYTHING, make_trainer, state_of

NUM_FEATURES, NUM_HIDDEN, NUM_CLASSES, NUM_ROWS = 8, 16, 3, 10
#: Number of samples of a global batch.
BATCH_SIZE = 8
NUM_RANKS = 2
#: Faults that are injected into the gradients before an optimizer step, to verify that a cell can fail.
FAULTS = {"ranks differ": lambda rank: 1.0 + 0.2 * rank, "all too small": lambda rank: 0.5}


class Samples(Dataset):
    """Numbered samples: rank 0 has the even numbers, rank 1 the odd numbers."""

    def __init__(self, num_batches: int, seed: int = 7) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.features = torch.randn(num_batches * BATCH_SIZE, NUM_FEATURES, generator=generator)
        self.labels = self.features[:, :NUM_CLASSES].argmax(dim=1)
        self.rows = torch.randint(NUM_ROWS, (len(self.labels),), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.features[index], self.labels[index], self.rows[index], torch.tensor(index)


class Stream(IterableDataset):
    """The batches of a rank, as an iterable without a length."""

    def __init__(self, samples: Samples, batches: list[list[int]]) -> None:
        self.samples, self.batches = samples, batches

    def __iter__(self) -> Iterator[Any]:
        return (default_collate([self.samples[index] for index in batch]) for batch in self.batches)


class Net(pl.LightningModule):
    """A model whose behavior the flags of a setup select.

    In every second batch, samples of rank 1 use a different head than samples of rank 0 ("unused"), or no row of the
    embedding ("sparse").
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup_of_cell, self.flags = setup, frozenset(setup.flags)
        self.automatic_optimization = "manual" not in self.flags
        normalization = [nn.BatchNorm1d(NUM_HIDDEN)] if "batch norm" in self.flags else []
        self.backbone = nn.Sequential(
            nn.Linear(NUM_FEATURES, NUM_HIDDEN), *normalization, nn.Tanh(), nn.Linear(NUM_HIDDEN, NUM_HIDDEN)
        )
        self.heads = nn.ModuleList(
            nn.Linear(NUM_HIDDEN, NUM_CLASSES) for _ in range(2 if "unused" in self.flags else 1)
        )
        self.rows = nn.Embedding(NUM_ROWS, NUM_HIDDEN, sparse=True) if "sparse" in self.flags else None

    # --- model ---

    def configure_model(self) -> None:
        if "compiled part" in self.flags:
            self.backbone.compile(backend="eager")

    def forward(self, features: Tensor, rows: Tensor, index: Tensor) -> Tensor:
        if "checkpointed" in self.flags and self.training:
            hidden = checkpoint(self.backbone, features, use_reentrant=False)
        else:
            hidden = self.backbone(features)
        other = (index // BATCH_SIZE % 2 == 1) & (index % 2 == 1)
        if self.rows is not None:
            with_row = torch.nonzero(~other).flatten()
            hidden = hidden.index_add(0, with_row, self.rows(rows[with_row]).to(hidden.dtype))
        hidden = torch.tanh(hidden)
        if "unused" not in self.flags or "static" in self.flags:  # a static graph leaves the same head unused
            return self.heads[0](hidden)
        parts, all_indices = [], []
        for head, chosen in zip(self.heads, (~other, other), strict=True):
            indices = torch.nonzero(chosen).flatten()
            if len(indices):
                parts.append(head(hidden[indices]))
                all_indices.append(indices)
        return torch.cat(parts)[torch.cat(all_indices).argsort()]

    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            return (self.loss(batch["a"]) + self.loss(batch["b"])) / 2
        features, labels, rows, index = batch
        return functional.cross_entropy(self(features, rows, index), labels)

    def configure_optimizers(self) -> Any:
        trained = [(name, value) for name, value in self.named_parameters() if value.requires_grad]
        if "two" in self.flags:
            groups = [[value for name, value in trained if name.endswith("bias") == biases] for biases in (True, False)]
        else:
            groups = [[value for _, value in trained]]
        optimizers: list[Any] = []
        for number, group in enumerate(groups):
            if "lbfgs" in self.flags:
                optimizers.append(torch.optim.LBFGS(group, lr=0.5, max_iter=2))
            elif number == 0 and "two" in self.flags:
                optimizers.append(torch.optim.Adam(group, lr=0.02, eps=1e-3))
            else:
                optimizers.append(torch.optim.SGD(group, lr=0.1, momentum=0.0 if "sparse" in self.flags else 0.9))
        if "scheduler" not in self.flags:
            return optimizers
        interval = {"interval": "step"}
        return optimizers, [
            {"scheduler": torch.optim.lr_scheduler.ExponentialLR(each, 0.9), **interval} for each in optimizers
        ]

    # --- steps ---

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            loss = self.loss(batch)
            self._log_loss(loss)
            return loss if batch_idx not in self._batches_without_loss else self._contribution(loss, batch, batch_idx)
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        if "lbfgs" in self.flags:
            for optimizer in optimizers:
                optimizer.step(lambda: self._closure(batch))
        elif "alternating" in self.flags:
            for optimizer in optimizers:
                self.toggle_optimizer(optimizer)
                self._backward_and_step(batch, batch_idx, [optimizer])
                self.untoggle_optimizer(optimizer)
        else:
            self._backward_and_step(batch, batch_idx, optimizers)
        if "scheduler" in self.flags:
            schedulers = self.lr_schedulers()
            for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
                scheduler.step()
        return None

    @property
    def _batches_without_loss(self) -> range:
        """Batches of which rank 1 has no loss: the second accumulation window of an epoch."""
        return range(2, 4) if {"missing loss", "nan loss"} & self.flags else range(0)

    def _contribution(self, loss: Tensor, batch: Any, batch_idx: int) -> Tensor | None:
        """Returns the loss of a batch of which only rank 0 has a loss; one device uses the samples of rank 0."""
        if self.trainer.world_size == 1:
            return self.loss(_samples_of_rank_0(batch))
        if self.trainer.global_rank == 0:
            return loss
        is_missing = "missing loss" in self.flags and (batch_idx == 2 or "nan loss" not in self.flags)
        return None if is_missing else loss * torch.nan

    @torch.compiler.disable  # `torch.compile` does not support Lightning's `log`, with any strategy
    def _log_loss(self, loss: Tensor) -> None:
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=False)

    def _closure(self, batch: Any) -> Tensor:
        self.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        return loss

    def _backward_and_step(self, batch: Any, batch_idx: int, optimizers: list[Any]) -> None:
        every = 2 if "accumulation" in self.flags else 1
        steps = (batch_idx + 1) % every == 0
        strategy = self.trainer.strategy
        blocks = not steps and self.trainer.world_size > 1
        with strategy.block_backward_sync() if blocks else nullcontext():
            loss = self.loss(batch)
            self.manual_backward(loss / every)
        self._log_loss(loss)
        if steps:
            for optimizer in optimizers:
                if self.setup_of_cell.clip:
                    self.clip_gradients(optimizer, **self.setup_of_cell.clip)
                optimizer.step()
                optimizer.zero_grad()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        features, _, rows, index = batch
        return index, self(features, rows, index)

    # --- data ---

    def train_dataloader(self) -> Any:
        if "combined" in self.flags:
            return CombinedLoader({"a": self._batches(7), "b": self._batches(8)}, "min_size")
        return self._batches(7)

    def val_dataloader(self) -> Any:
        samples: Dataset = Samples(3, 9)
        # One batch more on rank 0 than on rank 1, or the same number.
        samples = Subset(samples, range(2 * BATCH_SIZE + ("odd evaluation" in self.flags)))
        return DataLoader(samples, batch_size=BATCH_SIZE // self.trainer.world_size)

    test_dataloader = predict_dataloader = val_dataloader

    def _batches(self, seed: int) -> DataLoader:
        return batches_of(self.setup_of_cell, self.trainer.global_rank, self.trainer.world_size, seed)


def batches_of(setup: Setup, rank: int, world_size: int, seed: int = 7) -> DataLoader:
    """Returns the batches of a rank. One device has the samples of all ranks in its batches."""
    lengths, is_alone = setup.lengths, world_size == 1
    samples, size = Samples(max(lengths), seed), BATCH_SIZE // world_size
    if "uneven stop" in setup.flags and is_alone:
        lengths = (min(lengths),) * 2
    batches = [
        [
            index
            for index in range(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
            if step < lengths[index % NUM_RANKS] and (is_alone or index % NUM_RANKS == rank)
        ]
        for step in range(max(lengths))
    ]
    batches = [batch for batch in batches if batch]
    if "iterable" in setup.flags:
        return DataLoader(Stream(samples, batches), batch_size=None)
    if any(flag.startswith("uneven") for flag in setup.flags):
        return DataLoader(samples, batch_sampler=batches)
    # A sampler that the Trainer creates would shuffle.
    sampler = None if is_alone else DistributedSampler(samples, world_size, rank, shuffle=False)
    return DataLoader(samples, batch_size=size, sampler=sampler)


def _samples_of_rank_0(batch: Any) -> Any:
    """Returns the part of a batch of one device that rank 0 has."""
    if isinstance(batch, dict):
        return {name: _samples_of_rank_0(part) for name, part in batch.items()}
    return [tensor[batch[-1] % NUM_RANKS == 0] for tensor in batch]


class _StopsAfterOneEpoch(Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop = True


class _Fault(Callback):
    """A callback that scales the gradients of a rank."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad *= FAULTS[self.name](trainer.global_rank)


def train(setup: Setup, strategy: Any, devices: Any, directory: Path, fault: str | None = None) -> dict[str, Any]:
    """Trains, and returns this process's observations: weights, states of optimizers, metrics, predictions.

    Args:
        setup: Setup of the training run.
        strategy: Function that creates the strategy; called for each Trainer.
        devices: Devices of the Trainer.
        directory: Directory for checkpoints, the same on all ranks.
        fault: A key of :data:`FAULTS`.
    """
    is_uneven = any(flag.startswith("uneven") for flag in setup.flags)
    own = {"default_root_dir": directory, "use_distributed_sampler": not is_uneven}

    def trainer_with(*callbacks: Callback, **arguments: Any) -> pl.Trainer:
        made = [*(make() for make in setup.callbacks), *callbacks, *([_Fault(fault)] if fault else [])]
        return make_trainer(strategy(), devices, callbacks=made, **{**own, **setup.trainer, **arguments})

    def model_of(seed: int) -> tuple[Net, Any]:
        pl.seed_everything(seed, verbose=False)
        model = Net(setup)
        compiles = "compiled" in setup.flags
        return model, torch.compile(model, backend="eager") if compiles else model

    saving = ModelCheckpoint(directory, "{epoch}", save_top_k=-1) if "resume" in setup.flags else None
    arguments: dict[str, Any] = {}
    model, given = model_of(11)
    before = state_of(model)
    if saving is not None:
        trainer_with(saving, _StopsAfterOneEpoch(), enable_checkpointing=True).fit(given)
        arguments = {"ckpt_path": directory / "epoch=0.ckpt", **LOADS_EVERYTHING}
        model, given = model_of(12)
    trainer = trainer_with()
    trainer.fit(given, **arguments)
    observed: dict[str, Any] = {
        "before": before,
        "weights": state_of(model),
        "optimizers": [tensors_of(optimizer.state_dict()["state"]) for optimizer in trainer.optimizers],
        "lrs": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
        "metrics": {name: value.clone() for name, value in trainer.callback_metrics.items()},
        "steps": (trainer.global_step, trainer.current_epoch),
    }
    if "stages" in setup.flags:
        observed["validated"] = trainer.validate(given, verbose=False)
        observed["tested"] = trainer.test(given, verbose=False)
        observed["predicted"] = [(int(i), row) for part in trainer.predict(given) for i, row in zip(*part, strict=True)]
    return observed


def tensors_of(state: Any) -> list[Tensor]:
    """Returns the floating-point tensors in the state of an optimizer, in order."""
    if isinstance(state, Tensor):
        return [state.detach().to_dense().clone()] if state.is_floating_point() else []
    values = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return [tensor for value in values for tensor in tensors_of(value)]
