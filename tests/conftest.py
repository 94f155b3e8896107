"""Settings, hooks and fixtures of all tests."""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from tests.support import ranks, tiers, virtual_environments
from tests.support.tiers import pytest_collection_modifyitems as pytest_collection_modifyitems
from tests.support.tiers import pytest_runtest_makereport as pytest_runtest_makereport
from tests.support.tiers import pytest_runtest_protocol as pytest_runtest_protocol
from tests.support.tiers import pytest_runtest_setup as pytest_runtest_setup

# Lightning's detection of MPI initializes MPI in each rank that creates a Trainer. This takes half a second, and leaves
# a file in /dev/shm for each killed or forked rank. Before Lightning 2.6, the detection fails if mpi4py finds no MPI;
# MPI must then share no memory, which takes a tenth of a second. The test that uses MPI resets the variables.
os.environ.update(ranks.WITHOUT_MPI)

# A shell that runs tests in the background makes all processes ignore SIGINT, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The state if Lightning is imported under pytest and not before: tests read its log messages.
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).propagate = True

# Tests run in parallel with small models: more threads would only wait for each other.
torch.set_num_threads(1)

# OpenMP's threads do not survive a fork. A forked test with a parallel computation would wait for them indefinitely, if
# an earlier test, or the creation of its parameters, has computed in parallel in this process.
os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


def pytest_sessionstart(session: pytest.Session) -> None:
    # With --numprocesses, this process runs no tests.
    if not session.config.getoption("numprocesses", None):
        tiers.detect_processes()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freezes all imported objects, so that no garbage collection in a forked process copies them.

    Starts the fork server of ranks before the tests, because the server would exit with a forked test.
    """
    gc.collect()
    gc.freeze()
    if any(item.get_closest_marker("processes") for item in session.items):
        ranks.start_server()


@pytest.fixture(autouse=True)
def rank_that_logs() -> Iterator[None]:
    """Restores the logging of rank 0 in this process, after a test in which a strategy had a different rank."""
    before = getattr(rank_zero_only, "rank", 0)
    yield
    rank_zero_only.rank = before


@pytest.fixture(scope="session", autouse=True)
def torchrun_logs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Makes torchrun create its log directories where pytest removes them. By default, torchrun leaves them in /tmp."""
    os.environ["PET_LOG_DIR"] = str(tmp_path_factory.mktemp("torchrun"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return virtual_environments.build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="session")
def wheel_install(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> virtual_environments.Environment:
    return virtual_environments.make_environment(wheel, tmp_path_factory.mktemp("wheel"))[0]
