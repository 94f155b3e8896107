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

# Lightning's detection of MPI initializes it in every rank that makes a Trainer, which takes half a second and leaves a
# file in /dev/shm for each rank that is killed or forked. Before 2.6 it fails where mpi4py finds no MPI; there, MPI is
# told to share no memory, which takes a tenth of a second. The one test that uses MPI takes this back.
os.environ.update(ranks.WITHOUT_MPI)

# A shell that runs tests in the background has them, and all that they start, ignore Ctrl-C, which some of them press.
signal.signal(signal.SIGINT, signal.default_int_handler)

# As it is where Lightning is imported under pytest and not before: tests read what it says.
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).propagate = True

# Tests run at once, and their models are small: more threads would only wait for each other.
torch.set_num_threads(1)

# OpenMP's threads do not survive a fork: a forked test that computes in parallel would wait for them indefinitely, if
# an earlier test, or its parameters, has computed in parallel in this process.
os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


def pytest_sessionstart(session: pytest.Session) -> None:
    # With --numprocesses, this process runs no tests itself.
    if not session.config.getoption("numprocesses", None):
        tiers.watch_for_processes()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freezes all imported objects, so that no garbage collection in a forked process copies them.

    Starts the server that ranks are forked from before the tests, because a forked test could not keep it.
    """
    gc.collect()
    gc.freeze()
    if any(item.get_closest_marker("processes") for item in session.items):
        ranks.start_server()


@pytest.fixture(autouse=True)
def rank_that_logs() -> Iterator[None]:
    """Has this process log and show messages as rank 0 after a test in which a strategy was another rank."""
    before = getattr(rank_zero_only, "rank", 0)
    yield
    rank_zero_only.rank = before


@pytest.fixture(scope="session", autouse=True)
def torchrun_logs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Has torchrun create its log directories where pytest removes them. By default it leaves them in /tmp."""
    os.environ["PET_LOG_DIR"] = str(tmp_path_factory.mktemp("torchrun"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return virtual_environments.build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="session")
def wheel_install(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> virtual_environments.Environment:
    return virtual_environments.make_environment(wheel, tmp_path_factory.mktemp("wheel"))[0]
