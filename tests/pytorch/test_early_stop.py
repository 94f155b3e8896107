"""``trainer.should_stop`` on one rank stops all ranks before the same step; on all ranks, as with Lightning's ddp."""

import time
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, EarlyStopping, Timer

from tests.support.horovod_ranks import run_horovod
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import run_ranks

HOOKS = ("on_train_start", "on_train_batch_start", "on_train_batch_end", "on_validation_end", "on_train_epoch_end")
NUM_BATCHES = 4  # per epoch and rank


class Sets(Callback):
    """A callback that sets the attribute in a hook after two steps of the second epoch, and records the steps."""

    def __init__(self, hook: str, ranks: tuple[int, ...], slow_rank: int | None = None) -> None:
        self.hook, self.ranks, self.slow_rank = hook, ranks, slow_rank
        self.events: list[tuple[str, int]] = []

    def maybe_set(self, trainer: Any, hook: str) -> None:
        if hook != "on_train_batch_start":
            self.events.append((hook, trainer.global_step))
        is_due = trainer.global_step >= NUM_BATCHES + 2 or hook == "on_train_start"
        if hook == self.hook and is_due and trainer.global_rank in self.ranks and not trainer.sanity_checking:
            trainer.should_stop = True
        if trainer.global_rank == self.slow_rank and hook == "on_train_batch_end" and is_due:
            time.sleep(0.3)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.maybe_set(trainer, "on_train_start")

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.maybe_set(trainer, "on_train_batch_start")

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.maybe_set(trainer, "on_train_batch_end")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.maybe_set(trainer, "on_validation_end")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.maybe_set(trainer, "on_train_epoch_end")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.events.append(("on_train_end", trainer.global_step))


def train(strategy: str, *callbacks: Any, **kwargs: Any) -> dict[str, Any]:
    settings = {"max_epochs": 5, "val_check_interval": 2, "num_sanity_val_steps": 0, **kwargs}
    trainer = make_trainer(strategy, callbacks=[*callbacks], **settings)
    trainer.fit(MLP(), loader(8 * NUM_BATCHES), loader(16))
    events = next((each.events for each in callbacks if isinstance(each, Sets)), None)
    outcome = {"epochs": trainer.current_epoch, "steps": trainer.global_step, "events": events}
    return {**outcome, "should_stop": trainer.should_stop}


def set_on_all() -> list[tuple[str, Any, Any]]:
    """Returns each case with the records with this package's strategy and with Lightning's ddp."""
    cases: list[tuple[str, Any, Any]] = []
    for hook in HOOKS:
        for kwargs in ({}, {"min_epochs": 3}, {"min_steps": 9}):
            ext, stock = (train(name, Sets(hook, (0, 1)), **kwargs) for name in ("ddp_ext", "ddp"))
            cases.append((f"{hook}, {kwargs}", ext, stock))
    for new in (lambda: EarlyStopping("val_loss", patience=1, min_delta=10.0), lambda: Timer("00:00:00:00")):
        ext, stock = (train(name, new(), Sets("nowhere", ())) for name in ("ddp_ext", "ddp"))
        cases.append((type(new()).__name__, ext, stock))
    return cases


@pytest.mark.processes
def test_set_on_all_ranks_training_stops_exactly_where_lightnings_ddp_stops() -> None:
    first, second = run_ranks(set_on_all)
    for cases in (first, second):
        assert [(case, ext) for case, ext, _ in cases] == [(case, stock) for case, _, stock in cases]
    assert first == second
    assert {ext["steps"] for _, ext, _ in first} >= {0, 6, 8, 9, 12}


def set_on_one(strategy: str) -> dict[str, Any]:
    outcomes = {}
    for hook in HOOKS:
        for rank in (0, 1):
            for slow_rank in (None, 0, 1):
                case = f"{hook} on rank {rank}, rank {slow_rank} is slow"
                outcomes[case] = train(strategy, Sets(hook, (rank,), slow_rank))
        outcomes[f"{hook}, min_epochs"] = train(strategy, Sets(hook, (1,)), min_epochs=3)
    return outcomes


def assert_stopped_at_the_same_step(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    for case, outcome in first.items():
        assert outcome == second[case], case
        assert outcome["should_stop"], case
        earliest = 12 if "min_epochs" in case else 0 if "on_train_start" in case else 6
        assert earliest <= outcome["steps"] <= max(12, earliest), case
        if "min_epochs" not in case:
            assert outcome["steps"] < 12, case
        assert outcome["events"][-1] == ("on_train_end", outcome["steps"]), case


@pytest.mark.processes
def test_set_on_one_rank_all_ranks_of_ddp_stop_at_the_same_step() -> None:
    assert_stopped_at_the_same_step(run_ranks(set_on_one, "ddp_ext"))


@pytest.mark.processes
def test_set_on_one_rank_all_ranks_of_horovod_stop_at_the_same_step() -> None:
    pytest.importorskip("horovod")
    assert_stopped_at_the_same_step(run_horovod("horovodrun", set_on_one, "horovod_ext"))


@pytest.mark.processes
def test_set_on_one_worker_all_workers_stop() -> None:
    callback = Sets("on_train_batch_end", (1,))
    outcome = train("ddp_spawn_ext", callback)
    assert 6 <= outcome["steps"] < 12
    assert callback.events[-1] == ("on_train_end", outcome["steps"])


def fit_and_validate_after_a_stop_in_the_last_step() -> list[Any]:
    trainer = make_trainer("ddp_ext", max_epochs=1, callbacks=[SetsAtTheEnd()])
    model = MLP()
    trainer.fit(model, loader(8 * NUM_BATCHES), loader(16))
    return [trainer.global_step, trainer.should_stop, len(trainer.validate(model, loader(16), verbose=False))]


class SetsAtTheEnd(Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == NUM_BATCHES and trainer.global_rank == 1:
            trainer.should_stop = True


@pytest.mark.processes
def test_a_stop_in_the_last_step_does_not_stop_the_next_stage() -> None:
    assert run_ranks(fit_and_validate_after_a_stop_in_the_last_step) == [[NUM_BATCHES, True, 1]] * 2
