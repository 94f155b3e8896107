"""A monitored value that differs between ranks: all ranks decide by the value of rank 0."""

import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_strategies_ext import RankDisagreementError
from lightning_strategies_ext.collectives import LocalCollectives
from lightning_strategies_ext.pytorch import monitored_values
from lightning_strategies_ext.pytorch.monitored_values import MonitoredValues
from tests.support.horovod_ranks import run_horovod
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


class OtherRanks(LocalCollectives):
    """Collectives of one rank, with given values of all ranks."""

    def __init__(self, rank: int, values: list[dict[str, Any]], names: list[str]) -> None:
        super().__init__(rank, len(values))
        self.gathered = torch.tensor(
            [[monitored_values._encode(each.get(name)) for name in names] for each in values], dtype=torch.float64
        )
        self.num_gathers = self.num_barriers = 0

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        self.num_gathers += 1
        torch.testing.assert_close(tensor, self.gathered[self.rank()], equal_nan=True, rtol=0, atol=0)
        return self.gathered

    def barrier(self, name: str | None = None) -> None:
        self.num_barriers += 1


def share(values: list[dict[str, Any]], *others: str, monitor: str | None = "auc") -> list[dict[str, Any]]:
    """Returns the value that each rank reads."""
    names = [*dict.fromkeys([*([monitor] if monitor else []), *others])]
    read = []
    for rank, own in enumerate(values):
        collectives = OtherRanks(rank, values, names)
        read.append(MonitoredValues(lambda: collectives, CPU).share("EarlyStopping", monitor, others, own))  # noqa: B023
        assert collectives.num_gathers == bool(names)
    return read


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.filterwarnings("ignore:`auc`, which EarlyStopping reads")
def test_each_rank_reads_rank_0s_value_of_rank_0s_dtype(dtype: torch.dtype) -> None:
    value = torch.tensor(7.1).to(dtype)
    read = share([{"auc": value}, {"auc": torch.tensor(0.3), "b": 1}, {}])
    assert [each["auc"].dtype for each in read] == [dtype] * 3
    assert all(torch.equal(each["auc"], value) for each in read)
    assert read[1]["b"] == 1


def test_an_equal_value_or_a_nan_is_the_object_of_the_rank() -> None:
    for number in (0.5, float("nan"), float("-inf")):
        values = [{"auc": torch.tensor(number)} for _ in range(2)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert all(read["auc"] is own["auc"] for read, own in zip(share(values), values, strict=True))


@pytest.mark.filterwarnings("ignore:`\\w+`, which EarlyStopping reads")
def test_values_in_a_file_name_are_rank_0s_and_may_be_missing_there() -> None:
    read = share([{"auc": 1.0, "loss": 2.0}, {"auc": 3.0, "loss": 4.0, "size": 5}], "loss", "size", "auc")
    assert read == [{"auc": 1.0, "loss": 2.0}] * 2


def test_without_a_name_nothing_is_gathered() -> None:
    assert share([{"auc": 1.0}, {"auc": 2.0}], monitor=None) == [{"auc": 1.0}, {"auc": 2.0}]


def test_a_value_that_is_no_number_on_rank_0_is_not_shared() -> None:
    values = [{"auc": "good"}, {"auc": torch.ones(2)}, {"auc": 1.0}]
    assert share(values) == values


def test_without_a_value_on_rank_0_every_rank_raises_after_a_barrier() -> None:
    values = [{}, {"auc": 1.0}, {}, {"auc": 2.0}]
    for rank, own in enumerate(values):
        collectives = OtherRanks(rank, values, ["auc"])
        with pytest.raises(
            RankDisagreementError, match="monitors `auc`, which rank 0 has not logged, but ranks 1 and 3"
        ):
            MonitoredValues(lambda: collectives, CPU).share("EarlyStopping", "auc", (), own)  # noqa: B023
        assert collectives.num_barriers == 1


def test_a_value_missing_on_all_ranks_is_left_to_lightning() -> None:
    assert share([{"a": 1}, {"b": 2}]) == [{"a": 1}, {"b": 2}]


def test_one_warning_per_name_lists_the_values_or_the_smallest_and_the_largest() -> None:
    for values, listed in (
        ([0.25, 0.5], "0.25 on rank 0, 0.5 on rank 1"),
        ([3.0, 9.0, 1.0, 2.0, 2.0], "3 on rank 0, 1 on rank 2, 9 on rank 1"),
    ):
        each = [{"auc": value} for value in values]
        shared = MonitoredValues(lambda: OtherRanks(0, each, ["auc"]), CPU)  # noqa: B023
        with pytest.warns(UserWarning, match=f"`auc`, which ModelCheckpoint reads, differs between ranks: {listed}\\."):
            shared.share("ModelCheckpoint", "auc", (), each[0])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shared.share("EarlyStopping", "auc", (), each[0])


def test_a_rank_that_has_failed_reads_its_own_values() -> None:
    values = {"auc": torch.tensor(2.0)}
    shared = MonitoredValues(lambda: LocalCollectives(1, 2), CPU).share("ModelCheckpoint", "auc", (), values)
    assert shared == values


# --- with ranks ---

MODES = ("rank_zero_only", "not synced", "logged by rank 0")
READERS = ("checkpoint", "stop", "plateau")


class LogsPerRank(MLP):
    """A model that logs values that increase on rank 0 and decrease on the other ranks."""

    def __init__(self, mode: str, reader_kind: str) -> None:
        super().__init__()
        self.mode, self.reader_kind = mode, reader_kind
        self.rates: list[float] = []
        self.own: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = 0.1 * (self.current_epoch + 1) * (1 if self.global_rank == 0 else -1)
        is_logged = self.mode != "logged by rank 0" or self.global_rank == 0
        if self.mode == "logged by rank 1":
            is_logged = self.global_rank == 1
        if is_logged and self.mode != "nothing":
            self.log("auc", value, on_epoch=True, rank_zero_only=self.mode != "not synced")

    def on_train_epoch_end(self) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        self.own.append(float(self.trainer.callback_metrics.get("auc", 0)))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        if self.reader_kind != "plateau":
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "auc"}}


@contextmanager
def trainer_of(strategy: str, reader_kind: str, **kwargs: Any) -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as directory:
        callbacks: list[Any] = []
        if reader_kind == "checkpoint":
            callbacks = [ModelCheckpoint(directory, "{epoch}-{auc:.2f}", monitor="auc", mode="max", save_top_k=2)]
        if reader_kind == "stop":
            callbacks = [EarlyStopping("auc", mode="max", patience=1)]
        is_saving = {"enable_checkpointing": reader_kind == "checkpoint"}
        yield make_trainer(strategy, callbacks=callbacks, max_epochs=4, num_sanity_val_steps=0, **is_saving, **kwargs)


def decide(strategy: str) -> dict[tuple[str, str], Any]:
    """Returns what this rank has decided, in all modes."""
    decided = {}
    for reader_kind in READERS:
        for mode in MODES:
            with trainer_of(strategy, reader_kind) as trainer, warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                model = LogsPerRank(mode, reader_kind)
                trainer.fit(model, loader(16), loader(16))
                warned = [str(each.message) for each in found if "differs between ranks" in str(each.message)]
                assert len(warned) == (trainer.is_global_zero and mode != "logged by rank 0"), warned
                assert all("0.1 on rank 0, -0.1 on rank 1" in text for text in warned)
                assert (model.own[-1] > 0) == trainer.is_global_zero
                outcome: dict[str, Any] = {"epochs": trainer.current_epoch, "rates": model.rates}
                outcome["weights"] = [parameter.tolist() for parameter in model.parameters()]
                if reader_kind == "checkpoint":
                    callback = trainer.checkpoint_callback
                    outcome["scores"] = {Path(k).name: float(v) for k, v in callback.best_k_models.items()}
                    outcome["best"] = Path(callback.best_model_path).name
                decided[reader_kind, mode] = outcome
    return decided


def assert_decided_alike(ranks: list[dict[tuple[str, str], Any]]) -> None:
    first, second = ranks
    assert first == second
    for (reader_kind, mode), outcome in first.items():
        assert outcome["epochs"] == 4, (reader_kind, mode)
        assert outcome["rates"] == [0.1] * 4, (reader_kind, mode)
        if reader_kind == "checkpoint":
            assert outcome["scores"] == pytest.approx({"epoch=2-auc=0.30.ckpt": 0.3, "epoch=3-auc=0.40.ckpt": 0.4})
            assert outcome["best"] == "epoch=3-auc=0.40.ckpt"


@pytest.mark.processes
def test_ranks_of_ddp_decide_by_rank_0s_values_and_users_read_their_own() -> None:
    assert_decided_alike(run_ranks(decide, "ddp_ext"))


@pytest.mark.processes
def test_ranks_of_horovod_decide_by_rank_0s_values() -> None:
    pytest.importorskip("horovod")
    assert_decided_alike(run_horovod("horovodrun", decide, "horovod_ext"))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("strategy", "reader_kind"),
    [*(("ddp_spawn_ext", reader_kind) for reader_kind in READERS), ("ddp_spawn_elastic_ext", "plateau")],
)
def test_spawned_workers_decide_by_rank_0s_values(strategy: str, reader_kind: str) -> None:
    with trainer_of(strategy, reader_kind) as trainer:
        model = LogsPerRank("not synced", reader_kind)
        trainer.fit(model, loader(16), loader(16))
        assert trainer.current_epoch == 4
        assert model.rates == [0.1] * 4
        assert not any("_monitor_candidates" in vars(callback) for callback in trainer.callbacks)


def fail(mode: str) -> dict[str, str]:
    texts = {}
    for reader_kind in READERS:
        with trainer_of("ddp_ext", reader_kind) as trainer, pytest.raises(Exception) as raised:  # noqa: PT011
            trainer.fit(LogsPerRank(mode, reader_kind), loader(16), loader(16))
        texts[reader_kind] = f"{raised.type.__name__}: {raised.value}"
    return texts


@pytest.mark.processes
def test_a_value_that_only_another_rank_has_is_an_error_on_all_ranks() -> None:
    readers = {"checkpoint": "ModelCheckpoint", "stop": "EarlyStopping", "plateau": "ReduceLROnPlateau"}
    for texts in run_ranks(fail, "logged by rank 1"):
        for reader_kind, reader in readers.items():
            start = f"RankDisagreementError: {reader} monitors `auc`, which rank 0 has not logged, but rank 1 has."
            assert texts[reader_kind].startswith(start)


@pytest.mark.processes
def test_a_value_that_no_rank_has_is_lightnings_error() -> None:
    for texts in run_ranks(fail, "nothing"):
        assert re.match("MisconfigurationException: .*could not find the monitored key", texts["checkpoint"])
        assert re.match("RuntimeError: Early stopping conditioned on metric `auc`", texts["stop"])
        assert re.match("MisconfigurationException: ReduceLROnPlateau conditioned on metric auc", texts["plateau"])
