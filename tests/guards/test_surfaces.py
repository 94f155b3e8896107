"""The public interface is that of the snapshots; see :mod:`tests.guards.surfaces`."""

import pytest

from tests.guards.surfaces import SNAPSHOTS, Surface, surfaces
from tests.guards.versions import COMMAND, skip_unless_recorded

SURFACES = {surface.name: surface for surface in surfaces()}


@pytest.mark.parametrize("surface", SURFACES.values(), ids=SURFACES)
def test_the_public_interface_is_that_of_the_snapshot(surface: Surface) -> None:
    recorded, _ = surface.read()
    skip_unless_recorded(recorded, surface.versions)
    difference = surface.difference()
    assert not difference, difference


def test_every_snapshot_is_of_a_part_of_the_public_interface() -> None:
    names = {str(path.relative_to(SNAPSHOTS).with_suffix("")) for path in SNAPSHOTS.rglob("*.*")}
    assert names == SURFACES.keys(), f"To rewrite the snapshots: {COMMAND}"
