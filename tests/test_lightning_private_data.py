"""What :mod:`lightning_strategies_ext._lightning` needs of Lightning's training data, by behaviour."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torchmetrics import MaxMetric, SumMetric
from torchmetrics.utilities.data import dim_zero_max, dim_zero_sum

from lightning_strategies_ext import _lightning
from tests.support.models import MLP, loader, make_trainer


def test_what_is_to_be_done_after_loaders_are_made_is_done_then_and_can_be_undone() -> None:
    trainer = make_trainer("auto", devices=1, max_epochs=1)
    seen: list[tuple[int, Any]] = []
    undo = _lightning.after_setup_data(
        trainer, lambda: seen.append((len(trainer.train_dataloader), _lightning.data_fetcher_of(trainer)))
    )
    assert _lightning.data_fetcher_of(trainer) is None
    trainer.fit(MLP(), loader(num_samples=64, batch_size=4))
    assert [length for length, _ in seen] == [16] * len(seen)
    assert seen
    assert seen[0][1].combined_loader.flattened == [trainer.train_dataloader]
    undo()
    undo()
    assert "setup_data" not in vars(trainer.fit_loop)


class Fetches(Callback):
    """Notes in which order batches are asked for, begin and end, and the step that loggers are told."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.steps: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.seen.append("batch")

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen.append("end")
        self.steps.append(_lightning.step_of_loggers(trainer))


def test_what_is_to_be_done_before_a_batch_is_asked_for_is_done_then_and_can_be_undone() -> None:
    fetches = Fetches()
    trainer = make_trainer("auto", devices=1, max_epochs=2, callbacks=[fetches], accumulate_grad_batches=2)
    undo = _lightning.before_fetch(trainer, lambda step: fetches.seen.append(f"fetch {step}"))
    trainer.fit(MLP(), loader(num_samples=16, batch_size=4))
    assert fetches.seen == [said for step in fetches.steps for said in (f"fetch {step}", "batch", "end")]
    assert fetches.steps == [0, 0, 1, 1, 2, 2, 3, 3]
    undo()
    undo()
    assert "_on_before_fetch" not in vars(trainer.fit_loop.epoch_loop)


def test_hooks_of_a_callback_can_be_left_out_and_are_called_again() -> None:
    fetches = Fetches()
    trainer = make_trainer("auto", devices=1, max_epochs=1, callbacks=[fetches])
    _lightning.call_hooks(fetches, ["on_train_batch_start"], False)
    trainer.fit(MLP(), loader(num_samples=8, batch_size=4))
    assert fetches.seen == ["end"] * 2
    _lightning.call_hooks(fetches, ["on_train_batch_start"], True)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(MLP(), loader(num_samples=8, batch_size=4))
    assert fetches.seen[2:] == ["batch", "end"] * 2


class Halved:
    """Gives every second batch of a fetcher."""

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "inner", inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)

    def __iter__(self) -> "Halved":
        iter(self.inner)
        return self

    def __next__(self) -> Any:
        next(self.inner)
        return next(self.inner)


class Batches(Callback):
    def __init__(self) -> None:
        self.first: list[torch.Tensor] = []
        self.num_validations = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.first.append(batch[0][0])

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.num_validations += 1


@pytest.mark.parametrize(("interval", "num_validations"), [(1.0, 2), (0.5, 4)])
def test_fit_takes_its_batches_from_what_stands_in_for_its_fetcher(interval: float, num_validations: int) -> None:
    batches = Batches()
    trainer = make_trainer("auto", devices=1, max_epochs=2, callbacks=[batches], val_check_interval=interval)
    data = loader(num_samples=64, batch_size=4)

    def halve() -> None:
        fetcher = _lightning.data_fetcher_of(trainer)
        if not isinstance(fetcher, Halved):
            _lightning.set_data_fetcher(trainer, Halved(fetcher), 8)

    _lightning.after_setup_data(trainer, halve)
    trainer.fit(MLP(), data, loader(num_samples=4))
    expected = [features[0] for features, _ in list(data)[1::2]]
    assert torch.equal(torch.stack(batches.first), torch.stack(expected * 2))
    assert trainer.num_training_batches == 8
    assert batches.num_validations == num_validations


class LogsBothWays(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("per_step", 1.0, on_step=True, on_epoch=False)
        self.log("per_epoch", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="sum")
        return self.loss(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        (metric,) = _lightning.logged_per_epoch(self.trainer)
        self.states = {name: state.clone() for name, state in metric.metric_state.items()}


def test_what_is_logged_per_epoch_is_added_up_in_states_of_metrics() -> None:
    model = LogsBothWays()
    make_trainer("auto", devices=1, max_epochs=1).fit(model, loader(num_samples=16, batch_size=4))
    assert model.states["value"].item() == 0 + 1 + 2 + 3


class GoesOn(LogsBothWays):
    def __init__(self, sums: Any) -> None:
        super().__init__()
        self.sums = sums

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            _lightning.set_sums_of_logging(self.trainer, self.sums)

    def on_train_batch_end(self, *args: Any) -> None:
        self.sums = _lightning.sums_of_logging(self.trainer)


class AddsMore(MLP):
    """Adds ten to what is there after the first batch, and what is not there yet."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            position, sums = _lightning.sums_of_logging(self.trainer)
            states = {"value": sums["training_step.per_epoch"]["value"] + 10.0}
            more = {"training_step.per_epoch": states, "training_step.late": {"value": torch.tensor(5.0)}}
            _lightning.add_sums_of_logging(self.trainer, (position, more))
            self.merging = _lightning.merging_of_logging(self.trainer)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx > 1:
            self.log("late", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        for op in ("max", "min", "mean", "sum"):
            self.log(op, 1.0, on_epoch=True, sync_dist=True, reduce_fx=op)
        self.log("per_epoch", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="sum")
        return self.loss(batch)


@pytest.mark.forked
def test_sums_of_logging_can_be_set_in_the_middle_of_an_epoch_and_how_ranks_merge_them_is_known() -> None:
    trainer = make_trainer("ddp_ext", devices=1, max_epochs=1)
    model = AddsMore()
    trainer.fit(model, loader(num_samples=16, batch_size=4))
    assert trainer.callback_metrics["per_epoch"].item() == 6.0 + 10.0
    assert trainer.callback_metrics["late"].item() == 5.0 + 2.0
    ops = {"max": "max", "min": "min", "mean": "sum", "sum": "sum"}
    assert model.merging == {f"training_step.{name}": op for name, op in ops.items()}


def test_how_processes_merge_the_states_of_a_metric_is_known() -> None:
    assert _lightning.merging_of_metric(SumMetric()) == {"sum_value": dim_zero_sum}
    assert _lightning.merging_of_metric(MaxMetric()) == {"max_value": dim_zero_max}


def test_what_another_process_has_added_up_is_added_to() -> None:
    sums: Any = ((False, None), {})
    for expected in (6.0, 12.0):
        trainer = make_trainer("auto", devices=1, max_epochs=1)
        _lightning.skip_needless_moves(trainer)
        model = GoesOn(sums)
        trainer.fit(model, loader(num_samples=16, batch_size=4))
        assert trainer.callback_metrics["per_epoch"].item() == expected
        sums = model.sums
    assert list(sums[1]) == ["training_step.per_epoch"]
