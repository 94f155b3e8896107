"""Fixtures of the tests of ``shm``."""

import pytest

from lightning_strategies_ext.shm.native_build import NATIVE_VARIABLE
from tests.support.ranks import rank_environment


@pytest.fixture(params=["compiled", "in rounds"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Selects the implementation of all-reduces; other collectives use rounds."""
    monkeypatch.setitem(rank_environment, NATIVE_VARIABLE, "1" if request.param == "compiled" else "0")
    return request.param
