"""Starts the server that test ranks are forked from, once per session and not again in forked tests."""

import pytest

from tests import ranks


def pytest_sessionstart(session: pytest.Session) -> None:
    ranks.start_server()
