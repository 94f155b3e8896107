"""Starts the server that test ranks are forked from once per session."""

import pytest

from tests import ranks


@pytest.fixture(scope="session", autouse=True)
def rank_server() -> None:
    ranks.start_server()
