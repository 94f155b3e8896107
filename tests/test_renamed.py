"""Names of earlier versions: the error contains the present name."""

import pytest

from lightning_strategies_ext import (
    CommunicationMonitor,
    DataParallelStrategy,
    DDPRayStrategy,
    DDPSpawnElasticStrategy,
    DDPSpawnStrategy,
    DDPStrategy,
    HorovodStrategy,
    RankFailedError,
    registry,
)
from lightning_strategies_ext import fabric as ext


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        (DDPStrategy, "patience", "hang_timeout"),
        (DDPSpawnStrategy, "patience", "hang_timeout"),
        (ext.DDPStrategy, "patience", "hang_timeout"),
        (DDPRayStrategy, "placement", "placement_strategy"),
        (DataParallelStrategy, "take_turns", "sequential"),
        (ext.DataParallelStrategy, "take_turns", "sequential"),
        (HorovodStrategy, "patience", "hang_timeout"),
        (ext.HorovodStrategy, "patience", "hang_timeout"),
        (CommunicationMonitor, "directory", "dirpath"),
        (CommunicationMonitor, "picture", "plot"),
    ],
)
def test_an_old_name_of_an_argument_is_rejected_with_the_new_one(kind, old, new):
    with pytest.raises(TypeError, match=rf"`{kind.__name__}\({old}=...\)`: .* Use `{new}=...`."):
        kind(**{old: 60})


@pytest.mark.parametrize(
    ("make", "old", "new"),
    [
        (DDPStrategy, "part_of_store", "prefix_store"),
        (DDPStrategy, "around_stage", "wrap_stage"),
        (DDPStrategy, "has_met", "has_joined"),
        (DDPSpawnStrategy, "states_of_loaders", "loader_states"),
        (DDPSpawnElasticStrategy, "allowance", "restart_policy"),
        (ext.DDPStrategy, "stopping_together", "coordinated_stop"),
        (ext.DDPStrategy, "explained", "explain_exception"),
        (CommunicationMonitor, "times", "rank_times"),
        (lambda: RankFailedError("a message"), "is_stuck", "is_hang"),
    ],
)
def test_an_old_name_of_an_attribute_is_rejected_with_the_new_one(make, old, new):
    value = make()
    with pytest.raises(AttributeError, match=rf"`{type(value).__name__}.{old}` was renamed. Use `{new}`."):
        getattr(value, old)
    assert hasattr(value, new)
    assert not hasattr(value, old)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("DifferentModelsError", "ModelMismatchError"),
        ("ResultsError", "ResultTransferError"),
        ("WorldTooSmallError", "TooFewRanksError"),
    ],
)
def test_the_import_of_a_renamed_exception_names_the_new_one(old: str, new: str):
    with pytest.raises(ImportError, match=f"`lightning_strategies_ext.{old}` was renamed. Use `{new}`."):
        exec(f"from lightning_strategies_ext import {old}")
    exec(f"from lightning_strategies_ext import {new}")


def test_the_import_of_a_renamed_class_from_its_module_names_the_new_one():
    with pytest.raises(
        ImportError, match=r"registry.UnavailableHereError` was renamed. Use `StrategyUnavailableError`."
    ):
        registry.UnavailableHereError  # noqa: B018
    assert issubclass(registry.StrategyUnavailableError, RuntimeError)
    assert not hasattr(registry, "another_name")
