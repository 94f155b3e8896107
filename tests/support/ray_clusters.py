"""A Ray for the tests of a module, on this machine, and what is left in it. It can be imported without Ray."""

import importlib.util
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.support import warm
from tests.support.ranks import REPOSITORY

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (pip install 'lightning-strategies-ext[ray]')"
)
#: Only a test that hangs comes to that: where others use the machine, a worker has been seen to take a minute to start.
FOREVER_S = 900
#: The same for a program that a test runs, which shows what it has written then.
PROGRAM_S = 700
#: Two workers share a CPU, so that four fit where two of them would compute at once.
HALF = {"num_cpus_per_worker": 0.5}


@contextmanager
def own_ray() -> Iterator[None]:
    """Ray on this machine, started as the strategy starts it, for several Trainers; what it starts imports nothing."""
    from lightning_strategies_ext.launch.ray import cluster
    from lightning_strategies_ext.launch.ray.demand import Demand

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    try:
        with warm.spawned_processes():
            cluster.join("local", Demand(0.5), 1, None)
        yield
    finally:
        cluster.leave()
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def assert_nothing_is_left(pids: list[int]) -> None:
    """Fails unless the cluster is as it was before there were any workers."""
    import ray
    from ray.util import placement_group_table

    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        free, there = ray.available_resources(), ray.cluster_resources()
        groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
        if free.get("CPU") == there["CPU"] and not groups and not any(map(psutil.pid_exists, pids)):
            return
        time.sleep(0.1)
    raise AssertionError((free, there, groups, pids))
