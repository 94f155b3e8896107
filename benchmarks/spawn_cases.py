"""Code of one sample of :mod:`benchmarks.spawn`, which runs in a new interpreter and its workers."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

EXT = "ddp_spawn_ext"
NUM_WORKERS = 2
TENSOR_MB = 10
FLOATS_PER_MB = 2**20 // 4
#: Number of samples, and of floats that are predicted for each: 100 MB.
PREDICTIONS = (3200, 8192)
PREDICTIONS_MB = PREDICTIONS[0] * PREDICTIONS[1] // FLOATS_PER_MB
SMALL_CASE = (64, 1)
BATCH_SIZE = 32
#: Number of samples, and of floats of each: 1 GB in memory.
LARGE = (3200, 80 * 1024)


@dataclass(frozen=True)
class Case:
    """Case that one interpreter measures.

    Attributes:
        kind: "start", "large data", "bring back", "predictions" or "script".
        result_mb: Size of the results in MB, if memory is measured.
    """

    kind: str
    result_mb: int = 0

    @property
    def label(self) -> str:
        """Name of the case."""
        return f"{self.kind} {self.result_mb} MB" if self.result_mb else self.kind


class Model(pl.LightningModule):
    """One linear layer that is trained, frozen weights that change nevertheless, and predictions of any width."""

    def __init__(self, frozen_mb: int = 0, prediction_width: int = 1) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        # Frozen, so that they have no gradients. Not zeros, because pages of zeros may not be allocated.
        self.frozen = nn.ParameterList(
            nn.Parameter(torch.ones(TENSOR_MB * FLOATS_PER_MB), requires_grad=False)
            for _ in range(frozen_mb // TENSOR_MB)
        )
        self.frozen_mb = frozen_mb
        self.prediction_width = prediction_width

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Returns a loss."""
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Does nothing, because only the start is measured."""

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Does nothing."""

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Returns rows that contain the indices of their samples."""
        return batch[0].repeat(1, self.prediction_width)

    def on_train_end(self) -> None:
        """Changes the frozen weights, so that they are returned."""
        for weights in self.frozen:
            weights.add_(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns SGD."""
        return torch.optim.SGD(self.layer.parameters(), lr=1e-6)


class Clock(pl.Callback):
    """Records the times of events of rank 0's worker in files, because the stock strategy returns no callback state."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def record(self, trainer: pl.Trainer, event: str) -> None:
        """Records the time of an event, on the clock that all processes of a host share."""
        if trainer.is_global_zero:
            now = time.monotonic()
            (self.directory / event).write_text(repr(now))

    def time_of(self, event: str) -> float:
        """Returns the last time of an event."""
        return float((self.directory / event).read_text())

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Records the first batch."""
        if batch_idx == 0:
            self.record(trainer, "train")

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        """Records the first batch."""
        if batch_idx == 0:
            self.record(trainer, "validate")

    def on_test_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        """Records the first batch."""
        if batch_idx == 0:
            self.record(trainer, "test")

    def on_predict_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """Records the last batch."""
        self.record(trainer, "predict")

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """Records the end of the stage. This is the last hook of a callback in a worker."""
        self.record(trainer, "end")


class FileWriter(BasePredictionWriter):
    """Writes the predictions of the stock strategy to one file per rank."""

    def __init__(self, directory: Path) -> None:
        super().__init__(write_interval="epoch")
        self.directory = directory

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        """Writes this rank's batches, with the indices of their samples in the dataset."""
        torch.save((predictions, batch_indices[0]), self.directory / f"{trainer.global_rank}.pt")

    def read(self, shape: tuple[int, int]) -> Tensor:
        """Reads the files of all ranks into one tensor, in the order of the dataset."""
        result = torch.empty(shape)
        for file in sorted(self.directory.glob("*.pt")):
            for batch, indices in zip(*torch.load(file), strict=True):
                result[torch.tensor(indices)] = batch
        return result


def make_trainer(devices: Any, strategy: Any, callbacks: list[Any], **kwargs: Any) -> pl.Trainer:
    """Returns a Trainer for one epoch, without logs and checkpoints."""
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        callbacks=callbacks,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **kwargs,
    )


class Contender:
    """A Trainer with a strategy and a clock.

    Args:
        strategy: Argument of the Trainer.
        directory: Empty directory for the clock and the stock strategy's predictions.
    """

    def __init__(self, strategy: str, directory: Path) -> None:
        self.clock = Clock(directory)
        self.writer = None if strategy == EXT else FileWriter(directory)
        self.trainer = make_trainer(NUM_WORKERS, strategy, [self.clock, *([self.writer] if self.writer else [])])

    def predict(self, model: Model, shape: tuple[int, int]) -> Any:
        """Returns the predictions in the order of the dataset: a list of batches, or one tensor if read from files."""
        if self.writer is None:
            return self.trainer.predict(model, make_loader(shape[0]))
        self.trainer.predict(model, make_loader(shape[0]), return_predictions=False)
        return self.writer.read(shape)


def make_loader(num_samples: int) -> DataLoader[Any]:
    """Dataset in which each sample is its index."""
    samples = torch.arange(num_samples, dtype=torch.float32).unsqueeze(1)
    return DataLoader(TensorDataset(samples), batch_size=BATCH_SIZE)


def measure_start(contender: Contender, case: Case) -> dict[str, Any]:
    """Returns the seconds from the call of each of three stages of one Trainer to its first batch."""
    model, loader, trainer = Model(), make_loader(SMALL_CASE[0]), contender.trainer
    stages = {
        "start: fit": ("train", trainer.fit),
        "start: validate after fit": ("validate", trainer.validate),
        "start: test after validate": ("test", trainer.test),
    }
    seconds = {}
    for label, (event, stage) in stages.items():
        called_at = time.monotonic()
        stage(model, loader)
        seconds[label] = contender.clock.time_of(event) - called_at
    return {"seconds": seconds}


def measure_large_data(contender: Contender, case: Case) -> dict[str, Any]:
    """Returns the seconds of whole stages of a few batches, with 1 GB of data in the memory of the main process."""
    samples = torch.ones(LARGE)
    model, loader, trainer = Model(), DataLoader(FirstOfEach(samples), batch_size=BATCH_SIZE), contender.trainer
    trainer.limit_train_batches = trainer.limit_val_batches = trainer.limit_test_batches = 2
    seconds = {}
    for label, stage in (("fit", trainer.fit), ("validate after fit", trainer.validate), ("test", trainer.test)):
        called_at = time.monotonic()
        stage(model, loader)
        seconds[f"1 GB of data: {label}"] = time.monotonic() - called_at
    return {"seconds": seconds}


class FirstOfEach(Dataset[list[Tensor]]):
    """Dataset of the first number of each sample.

    Args:
        samples: Tensor with one row per sample.
    """

    def __init__(self, samples: Tensor) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> list[Tensor]:
        return [self.samples[index, :1].clone()]


def measure_result_transfer(contender: Contender, case: Case) -> dict[str, Any]:
    """Returns the seconds from the end of training in a worker to the return of ``fit``."""
    model = Model(frozen_mb=case.result_mb)
    contender.trainer.fit(model, make_loader(SMALL_CASE[0]))
    returned_at = time.monotonic()
    check_arrived(all(bool((weights == 2).all()) for weights in model.frozen), "weights")
    ended_at = contender.clock.time_of("end")
    return {"seconds": {case.label: returned_at - ended_at}, "window": (ended_at, returned_at)}


def measure_predictions(contender: Contender, case: Case) -> dict[str, Any]:
    """Returns the seconds of a call that returns large predictions, and the seconds after the last batch."""
    model = Model(prediction_width=PREDICTIONS[1])
    called_at = time.monotonic()
    predictions = contender.predict(model, PREDICTIONS)
    returned_at = time.monotonic()
    check_predictions(predictions, PREDICTIONS)
    ended_at = contender.clock.time_of("predict")
    seconds = {f"{case.label}: call": returned_at - called_at, f"{case.label}: last batch": returned_at - ended_at}
    return {"seconds": seconds, "window": (ended_at, returned_at)}


def run_script(contender: Contender, case: Case) -> dict[str, Any]:
    """Runs three stages, as a short script does. The calling process measures the time."""
    model, loader = Model(), make_loader(SMALL_CASE[0])
    contender.trainer.fit(model, loader)
    contender.trainer.test(model, loader)
    check_predictions(contender.predict(model, SMALL_CASE), SMALL_CASE)
    return {"seconds": {}}


KINDS = {
    "start": measure_start,
    "large data": measure_large_data,
    "bring back": measure_result_transfer,
    "predictions": measure_predictions,
    "script": run_script,
}


def check_predictions(predictions: Any, shape: tuple[int, int]) -> None:
    """Checks that predictions are those of all samples in order."""
    rows = torch.cat([batch[:, [0, -1]] for batch in predictions]) if isinstance(predictions, list) else predictions
    expected = torch.arange(shape[0], dtype=torch.float32)
    check_arrived(len(rows) == shape[0] and bool((rows == expected.unsqueeze(1)).all()), "predictions")


def check_arrived(has_arrived: bool, name: str) -> None:
    """Checks that a contender has returned its results.

    Raises:
        RuntimeError: If it has not.
    """
    if not has_arrived:
        raise RuntimeError(f"The {name} in the main process differ from those of the workers.")
