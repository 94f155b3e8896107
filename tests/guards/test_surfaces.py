"""The public interface agrees with the snapshots; see :mod:`tests.guards.surfaces`."""

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import StrategyRegistry

from lightning_strategies_ext import DataParallelStrategy, doctor
from tests.guards.surfaces import SNAPSHOTS, Surface, surfaces
from tests.guards.versions import COMMAND, skip_unless_recorded

SURFACES = {surface.name: surface for surface in surfaces()}


@pytest.mark.processes
@pytest.mark.parametrize("surface", SURFACES.values(), ids=SURFACES)
def test_the_public_interface_is_that_of_the_snapshot(surface: Surface) -> None:
    recorded, _ = surface.read()
    skip_unless_recorded(recorded, surface.versions)
    difference = surface.difference()
    assert not difference, difference


def test_every_snapshot_is_of_a_part_of_the_public_interface() -> None:
    names = {str(path.relative_to(SNAPSHOTS).with_suffix("")) for path in SNAPSHOTS.rglob("*.*")}
    assert names == SURFACES.keys(), f"To rewrite the snapshots: {COMMAND}"


# --- what the guard detects ---


def test_a_changed_method_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    surface = SURFACES["signatures"]
    skip_unless_recorded(surface.read()[0], surface.versions)
    monkeypatch.setattr(DataParallelStrategy, "added", lambda self, argument=1: None, raising=False)
    assert "\n+    added(self, argument=1)\n" in surface.difference()


def test_a_changed_description_of_an_argument_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    surface = SURFACES["command_line/DataParallelStrategy"]
    skip_unless_recorded(surface.read()[0], surface.versions)
    changed = (DataParallelStrategy.__doc__ or "").replace("sequential: ", "sequential: Changed. ")
    monkeypatch.setattr(DataParallelStrategy, "__doc__", changed)
    assert "\n+      Changed. " in surface.difference()


def test_a_changed_name_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(StrategyRegistry, "added_ext", dict(StrategyRegistry["dp_ext"]))
    assert "\n+Trainer: added_ext = " in SURFACES["registered_names"].difference()


def test_a_changed_fact_of_the_doctor_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "environment_info", lambda: {"added": "fact"})
    assert "\n+/environment/added\n" in SURFACES["doctor_keys"].difference()


@pytest.mark.processes
def test_further_subclasses_are_no_difference() -> None:
    """LightningCLI lists all subclasses that the process has imported."""
    before = SURFACES["command_line/DDPStrategy"].make()

    class Environment(LightningEnvironment):
        pass

    assert SURFACES["command_line/DDPStrategy"].make() == before
