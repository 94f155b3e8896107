"""Fabric rejects strategies of the Trainer, and the Trainer those of Fabric; the error has the correct code."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from lightning.fabric import Fabric
from lightning.pytorch import Trainer

import lightning_strategies_ext as for_the_trainer
from lightning_strategies_ext import fabric as for_fabric
from tests.support.models import make_trainer


class OfAUser(for_the_trainer.DDPSpawnPlugin):
    pass


def start_fabric(strategy: Any) -> Fabric:
    return Fabric(strategy=strategy, accelerator="cpu", devices=2)


REFUSED = [
    pytest.param(make, front_end, expected, id=f"{make.__name__} for {expected.__module__}")
    for make, front_end, expected in (
        (for_the_trainer.DDPStrategy, start_fabric, for_fabric.DDPStrategy),
        (for_the_trainer.DDPSpawnStrategy, start_fabric, for_fabric.DDPStrategy),
        (for_the_trainer.DataParallelStrategy, start_fabric, for_fabric.DataParallelStrategy),
        (for_the_trainer.HorovodStrategy, start_fabric, for_fabric.HorovodStrategy),
        (OfAUser, start_fabric, for_fabric.DDPStrategy),
        (for_fabric.DDPStrategy, make_trainer, for_the_trainer.DDPStrategy),
        (for_fabric.DataParallelStrategy, make_trainer, for_the_trainer.DataParallelStrategy),
        (for_fabric.HorovodStrategy, make_trainer, for_the_trainer.HorovodStrategy),
    )
]


@pytest.mark.parametrize(("make_strategy", "front_end", "expected"), REFUSED)
def test_an_error_names_the_name_to_use_instead(
    make_strategy: type, front_end: Callable[[Any], Any], expected: type
) -> None:
    with pytest.raises(ValueError, match=f"{make_strategy.__name__} object at ") as caught:
        front_end(make_strategy())
    own_name, other = ("the Trainer", "Fabric") if front_end is start_fabric else ("Fabric", "the Trainer")
    found = re.search(rf"for {own_name}\. For {other}: (from \S+ import \w+); (\w+\(.*?\))>", str(caught.value))
    assert found is not None, str(caught.value)
    namespace: dict[str, Any] = {}
    exec(f"{found[1]}\nstrategy = {found[2]}", namespace)
    assert type(namespace["strategy"]) is expected
    assert isinstance(front_end(namespace["strategy"]), (Fabric, Trainer))


def test_an_error_names_no_counterpart_where_there_is_none() -> None:
    class Written(for_the_trainer.ParallelStrategy):
        root_device = None

        def model_to_device(self) -> None: ...

    with pytest.raises(ValueError, match=r"strategy=<.*Written object at 0x[0-9a-f]+>`"):
        start_fabric(Written())
