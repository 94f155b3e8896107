"""A Ray cluster for the tests of a module, on this machine. The module can be imported without Ray.

with own_ray():
    trainer.fit(model, loader())
    assert_nothing_is_left(trainer.strategy.launcher.pids)
"""

import importlib.util
import json
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.hosts import Host, two_hosts
from tests.support.ranks import REPOSITORY, clean_environment, run_command

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (pip install 'lightning-strategies-ext[ray]')"
)
needs_ray_train = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="Ray Train is not installed (pip install 'ray[train]')"
)
#: Only a test that hangs comes to that: where others use the machine, a worker has been seen to take a minute to start.
FOREVER_S = 900
#: The same for a program that a test runs, which shows what it has written then.
PROGRAM_S = 700
#: Two workers share a CPU, so that four fit where two of them would compute at once.
HALF = {"num_cpus_per_worker": 0.5}


@contextmanager
def own_ray() -> Iterator[None]:
    """Ray on this machine, started as the strategy starts it, for several Trainers."""
    from lightning_strategies_ext.launch.ray import cluster
    from lightning_strategies_ext.launch.ray.cluster import ResourceDemand

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        try:
            cluster.connect("local", ResourceDemand(0.5), 1, None)
            yield
        finally:
            cluster.disconnect()


@contextmanager
def variables_of_own_ray() -> Iterator[dict[str, str]]:
    """The same, for programs: what they find it by in their environment."""
    with own_ray():
        import ray

        yield {
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # lets Ray take 127.0.0.1 for an address
            "PYTHONPATH": str(REPOSITORY),
        }


@contextmanager
def own_ray_for_train() -> Iterator[None]:
    """The same, for Ray Train."""
    with own_ray(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "600")  # on a busy machine, a minute is not enough
        patch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # a process less
        yield


@contextmanager
def ray_on_two_hosts(
    directory: Path, num_cpus: tuple[int, int], **settings: str
) -> Iterator[tuple[list[Host], dict[str, str], str]]:
    """A raylet on each of two hosts, the second of which is "far", the environment of a program that uses them, and
    Ray's directory.

    Args:
        directory: For the file of the hosts' names.
        num_cpus: Number of CPUs of each host.
        settings: Of Ray, as variables of the environment.

    Raises:
        NoHostsError: If there cannot be two hosts here.
    """
    quiet = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_TMPDIR": "/tmp",
        "PYTHONPATH": str(REPOSITORY),
        **settings,
    }
    short = f"/tmp/r{directory.stat().st_ino}"  # Ray's sockets are in it, whose paths must not be long
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats", "--node-ip-address"]
    try:
        with two_hosts(directory) as (first, second):
            address = f"{first.address}:6379"
            head = ["--head", "--port", "6379", "--temp-dir", short, "--include-dashboard", "false"]
            far = ["--address", address, "--resources", json.dumps({"far": 1})]
            for host, arguments, number in ((first, head, num_cpus[0]), (second, far, num_cpus[1])):
                command = [*host.enter(), *start, host.address, "--num-cpus", str(number), *arguments]
                run = run_command(*command, env=quiet)
                assert run.returncode == 0, run.stdout
            environment = {**clean_environment(), **quiet, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": address}
            yield [first, second], environment, short
    finally:
        shutil.rmtree(short, ignore_errors=True)


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
