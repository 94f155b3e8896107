"""Values of ``self.log(..., sync_dist=True)``: those of Lightning's ``ddp``, in one exchange, matched by key."""

import signal
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_strategies_ext import DDPStrategy, LoggedKeysError
from tests.support.horovod_ranks import try_horovod
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import leave_process_group, outcomes_of_ranks, run_ranks

pytestmark = pytest.mark.processes

OPERATIONS = ("mean", "sum", "min", "max")


class Recorder(DummyLogger):
    """Keeps what loggers receive."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.received.append((step, dict(metrics)))


class Observes(pl.Callback):
    """Keeps what callbacks and progress bars can read in each hook, and logs values itself."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, float], dict[str, float]]] = []

    def observe(self, hook: str, trainer: pl.Trainer) -> None:
        bar = {name: float(value) for name, value in trainer.progress_bar_metrics.items()}
        self.seen.append((hook, {name: value.item() for name, value in trainer.callback_metrics.items()}, bar))

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        module.log("callback", float(trainer.global_rank), sync_dist=True, on_step=True, on_epoch=True)
        self.observe("batch", trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.observe("train", trainer)

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.observe("validation", trainer)
        module.log("callback_end", 3.0 * trainer.global_rank, sync_dist=True)

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.observe("end", trainer)


class LogsEverything(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        for op in OPERATIONS:
            value = loss.detach().double() if op == "max" else loss
            self.log(f"{op}_both", value, sync_dist=True, reduce_fx=op, on_step=True, on_epoch=True, prog_bar=True)
            self.log(f"{op}_step", loss * 2, sync_dist=True, reduce_fx=op)
            self.log(f"{op}_epoch", loss * 3, sync_dist=True, reduce_fx=op, on_step=False, on_epoch=True, batch_size=6)
        self.log("own", loss, on_step=True, on_epoch=True)
        if self.global_rank == 0:
            self.log("first", loss, sync_dist=True, rank_zero_only=True)
        self.log("graph", loss, sync_dist=True, enable_graph=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("epoch_end", float(self.global_rank), sync_dist=True)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, prog_bar=True)
        self.log("step_loss", loss, sync_dist=True, on_step=True)
        self.log(f"named_{dataloader_idx}", loss, sync_dist=True, add_dataloader_idx=False, reduce_fx="max")

    def on_validation_epoch_end(self) -> None:
        self.log("validation_end", float(self.global_rank), sync_dist=True)

    test_step, on_test_epoch_end = validation_step, on_validation_epoch_end


class ComparesLater(DDPStrategy):
    """Exchanges values over gloo as over NCCL: the host compares the keys of a step later."""

    def __init__(self) -> None:
        super().__init__(process_group_backend="gloo")

    def _prepare_logging(self, trainer: pl.Trainer, backend: str | None = "") -> None:
        super()._prepare_logging(trainer, backend)
        self._logged_values._find_store = lambda: self.prefix_store("logged_values", 0)
        self._logged_values.reset()


def log_with_all() -> list[Any]:
    seen = []
    for strategy in ("ddp_ext", ComparesLater(), "ddp"):
        pl.seed_everything(11, verbose=False)
        observes, recorder = Observes(), Recorder()
        trainer = make_trainer(
            strategy, callbacks=[observes], logger=recorder, log_every_n_steps=1, num_sanity_val_steps=2, max_epochs=2
        )
        model = LogsEverything()
        trainer.fit(model, loader(48), [loader(32), loader(16)])
        fitted = {key: value.item() for key, value in trainer.callback_metrics.items()}
        validated = trainer.validate(model, [loader(32), loader(16)], verbose=False)
        tested = trainer.test(model, loader(32), verbose=False)
        seen.append((fitted, validated, tested, observes.seen, recorder.received))
        leave_process_group()
    return seen


def test_step_and_epoch_values_are_bitwise_those_of_ddp() -> None:
    for ext, compared_later, stock in run_ranks(log_with_all):
        assert ext == compared_later == stock
        fitted, _, _, seen, received = ext
        assert len(fitted) > 20
        assert len(seen) == 2 + 2 * (6 + 3) + 2  # sanity check, two epochs, validate
        assert len(received) > 20


# --- the order of keys, and different keys ---


class LogsInOrder(MLP):
    """Logs the given keys of its rank: the value of a key is the same on all ranks."""

    VALUES = {"a": 1.0, "b": 100.0, "c": 7.0}  # noqa: RUF012

    def __init__(self, hook: str, keys: tuple[str, str]) -> None:
        super().__init__()
        self.hook, self.keys = hook, keys

    def log_in(self, hook: str, **settings: Any) -> None:
        for key in self.keys[self.global_rank] if hook == self.hook else ():
            self.log(f"loss_{key}", self.VALUES[key], sync_dist=True, **settings)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_in("training_step")
        self.log_in("training epoch", on_step=False, on_epoch=True)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_in("validation_step")

    def on_validation_epoch_end(self) -> None:
        self.log_in("on_validation_epoch_end")


HOOKS = ("training_step", "training epoch", "validation_step", "on_validation_epoch_end")


def log_in_order(make_strategy: Callable[[], Any], hook: str, keys: tuple[str, str]) -> dict[str, float]:
    trainer = make_trainer(make_strategy(), max_epochs=1)
    trainer.fit(LogsInOrder(hook, keys), loader(16), loader(16))
    return {key: value.item() for key, value in trainer.callback_metrics.items()}


def over_shm() -> Any:
    return DDPStrategy(process_group_backend="shm")


def over_gloo() -> Any:
    return DDPStrategy(process_group_backend="gloo")


def over_horovod() -> Any:
    return "horovod_ext"


def log_everywhere_in_order(make_strategy: Callable[[], Any]) -> list[dict[str, float]]:
    return [log_in_order(make_strategy, hook, ("ab", "ba")) for hook in HOOKS]


@pytest.mark.parametrize("make_strategy", [over_shm, over_gloo])
def test_the_order_of_keys_does_not_matter(make_strategy: Callable[[], Any]) -> None:
    for outcomes in run_ranks(log_everywhere_in_order, make_strategy):
        assert outcomes == [{"loss_a": 1.0, "loss_b": 100.0}] * len(HOOKS)


def test_the_order_of_keys_does_not_matter_over_horovod() -> None:
    _, outcomes = try_horovod("horovodrun", log_everywhere_in_order, over_horovod)
    assert [*outcomes.values()] == [[{"loss_a": 1.0, "loss_b": 100.0}] * len(HOOKS)] * 2


def errors(*args: Any) -> list[str]:
    """Returns the errors of the ranks; on a busy machine, a rank that is late to raise may be killed by the other."""
    outcomes = outcomes_of_ranks(*args)
    assert all(outcome.error is not None and outcome.exit_code != 0 for outcome in outcomes), outcomes
    raised = [outcome.error or "" for outcome in outcomes if outcome.exit_code != -signal.SIGKILL]
    assert raised, outcomes
    return raised


def text_for(hook: str) -> tuple[str, str]:
    hook_name = "training_step" if hook == "training epoch" else hook
    return (
        f"Rank 0 reduces logged values ['loss_a', 'loss_b'] in {hook_name} (",
        f"), rank 1 reduces ['loss_b', 'loss_c'] in {hook_name} (",
    )


@pytest.mark.parametrize("make_strategy", [over_shm, over_gloo, ComparesLater])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_key_that_only_one_rank_logs_is_an_error_that_names_it(hook: str, make_strategy: Callable[[], Any]) -> None:
    for error in errors(log_in_order, make_strategy, hook, ("ab", "bc")):
        assert all(part in error for part in (*text_for(hook), "test_logged_values.py:")), error


def test_a_key_that_only_one_rank_logs_is_an_error_over_horovod() -> None:
    output, outcomes = try_horovod("horovodrun", log_in_order, over_horovod, "training_step", ("ab", "bc"))
    for outcome in outcomes.values():
        assert outcome.name == LoggedKeysError.__name__
        assert all(part in outcome.text for part in text_for("training_step")), output


def log_other_reduction() -> None:
    class LogsOtherReduction(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for key in range(12):
                self.log(f"key_{key}", 1.0, sync_dist=True)
            self.log("loss", 1.0, sync_dist=True, reduce_fx=("mean", "sum")[self.global_rank])
            return self.loss(batch)

    make_trainer("ddp_ext", max_epochs=1).fit(LogsOtherReduction(), loader(16))


def test_another_reduction_on_one_rank_is_an_error_that_names_it() -> None:
    for error in errors(log_other_reduction):
        assert "Rank 0 reduces logged values ['loss' (mean, float32)] and 12 others in training_step" in error
        assert "rank 1 reduces ['loss' (sum, float32)] and 12 others in training_step" in error
