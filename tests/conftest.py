"""Starts the server that test ranks are forked from, once per session and not again in forked tests."""

import os
import signal

import pytest

from tests import ranks

# Lightning's detection of MPI initializes it in every rank that makes a Trainer, which takes half a second and leaves a
# file in /dev/shm for each rank that is killed or forked. The one test that uses MPI takes this back.
os.environ.setdefault("MPI4PY_MPIABI", "none")

# A shell that runs tests in the background has them, and all that they start, ignore Ctrl-C, which some of them press.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    ranks.start_server()
