"""Classes and functions that workers cannot import are sent to workers; the main process receives its own objects."""

import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from tests.support.models import MLP, loader, make_trainer, state_of
from tests.support.ranks import REPOSITORY, clean_environment

pytestmark = pytest.mark.processes

ADDED = {"to": 1.0}


class HalvesLearningRate(Callback):
    def on_train_epoch_end(self, trainer, module):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] /= 2


def doubled(function: Any) -> Any:
    @wraps(function)
    def wrapper(*args: Any) -> Any:
        return 2 * function(*args)

    return wrapper


def make_class() -> Any:
    class Output(namedtuple("Output", ["logits", "index"])):
        @doubled
        def twice(self) -> Any:
            return self.logits

        @classmethod
        def empty(cls) -> "Output":
            return cls(torch.zeros(0), 0)

    return Output


@pytest.mark.parametrize("strategy", ["ddp_spawn_ext", "ddp_fork_ext"])
def test_local_classes_and_lambdas_train_the_weights_of_importable_ones(strategy: str) -> None:
    class Local(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.scale = lambda loss: loss * factor

        def training_step(self, batch, batch_idx):
            return self.scale(super().training_step(batch, batch_idx))

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [LambdaLR(optimizer, lambda epoch: 0.5**epoch)]

    class Counts(Callback):
        seen = ()

        def __init__(self) -> None:
            self.seen = []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.seen.append(batch_idx)

    def collate(samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [torch.stack(parts) for parts in zip(*samples, strict=True)]

    factor = 2.0
    torch.manual_seed(0)
    model = Local()
    start, scale, cls = state_of(model), model.scale, type(model)
    counts = Counts()
    trainer = make_trainer(strategy, max_epochs=2, callbacks=[counts])
    trainer.fit(model, loader(collate_fn=collate))
    assert type(model) is cls is Local
    assert model.scale is scale
    assert trainer.callbacks[0] is counts
    assert type(counts) is Counts
    assert (counts.seen, Counts.seen) == ([*range(8)] * 2, ())

    expected = MLP()
    expected.load_state_dict(start)
    expected.training_step = lambda batch, batch_idx: 2.0 * MLP.training_step(expected, batch, batch_idx)
    make_trainer("ddp_fork_ext", max_epochs=2, callbacks=[HalvesLearningRate()]).fit(expected, loader())
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_objects_of_local_classes_return_with_the_same_classes() -> None:
    class Grade(Enum):
        LOW = 0
        HIGH = 1

    @dataclass
    class Output:
        logits: Tensor
        grade: Grade

        @property
        def total(self) -> Any:
            return self.logits.sum() + ADDED["to"]

    class Predicts(MLP):
        def predict_step(self, batch, batch_idx):
            return [Output(row, Grade(index % 2)) for index, row in enumerate(super().predict_step(batch, batch_idx))]

    total = Output.__dict__["total"]
    outputs = [
        output for batch in make_trainer("ddp_spawn_ext").predict(Predicts(), loader(num_samples=8)) for output in batch
    ]
    assert len(outputs) == 8
    assert {type(output) for output in outputs} == {Output}
    assert {output.grade for output in outputs} <= set(Grade)
    assert Output.__dict__["total"] is total  # the returned class has not replaced it
    ADDED["to"] = 5.0
    assert torch.equal(outputs[0].total, outputs[0].logits.sum() + 5.0)


def test_objects_of_classes_that_a_worker_has_created_return_with_their_methods() -> None:
    class Predicts(MLP):
        output: Any = None

        def predict_step(self, batch, batch_idx):
            self.output = self.output or make_class()
            return self.output(super().predict_step(batch, batch_idx), torch.arange(len(batch[0])))

    batches = make_trainer("ddp_spawn_ext").predict(Predicts(), loader(num_samples=16))
    assert len(batches) == 4
    for batch in batches:
        assert batch._fields == ("logits", "index")
        assert torch.equal(batch.twice(), 2 * batch.logits)
        assert batch.empty().index == 0
        assert batch._replace(index=3).index == 3


def test_a_failure_in_a_local_class_is_reported_with_file_and_line() -> None:
    class Fails(MLP):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("on purpose")  # this line

    with pytest.raises(RuntimeError, match=r"^on purpose$") as raised:
        make_trainer("ddp_spawn_ext").fit(Fails(), loader())
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith("# this line"))
    assert f'test_by_value.py", line {line}' in str(raised.value.__cause__)


PROGRAM = """
from tests.support.models import MLP, loader, make_trainer

class Local(MLP):
    losses = []

    def training_step(self, batch, batch_idx):
        loss = factor * super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss

factor = 3.0
model = Local()
trainer = make_trainer("ddp_spawn_ext")
trainer.fit(model, loader())
print("TRAINED", type(model) is Local, trainer.global_step, all(p.isfinite().all() for p in model.parameters()))
"""


@pytest.mark.parametrize("option", ["-c", "-"])
def test_a_program_without_a_file_trains(option: str) -> None:
    process = subprocess.run(
        [sys.executable, option, PROGRAM] if option == "-c" else [sys.executable, option],
        input=None if option == "-c" else PROGRAM,
        env={**clean_environment(), "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "TRAINED True 16 True" in process.stdout, process.stdout + process.stderr
