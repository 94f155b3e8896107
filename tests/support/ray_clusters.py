"""Ray clusters on this machine, for the tests of a module. This module can be imported without Ray.

with own_ray():
    trainer.fit(model, loader())
    assert_no_process_remains(trainer.strategy.launcher.pids)
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

from tests.support.namespace_hosts import Host, two_hosts
from tests.support.ranks import REPOSITORY, clean_environment, run_command

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (pip install 'ray>=2.60,<3')"
)
needs_ray_train = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="Ray Train is not installed (pip install 'ray[train]')"
)
#: Time limit of a test, which only a hang reaches. On a busy machine, the start of a worker has taken a minute.
FOREVER_S = 900
#: Time limit of a program that a test runs; shorter, so that the test can show the output of the program.
PROGRAM_S = 700
#: CPUs per worker: two workers share a CPU, so that four workers fit on two CPUs.
HALF = {"num_cpus_per_worker": 0.5}


@contextmanager
def own_ray() -> Iterator[None]:
    """Starts Ray as the strategy does, for several Trainers."""
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
    """Starts Ray for programs; returns the variables by which they find it."""
    with own_ray():
        import ray

        yield {
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray accepts the address 127.0.0.1
            "PYTHONPATH": str(REPOSITORY),
        }


@contextmanager
def own_ray_for_train() -> Iterator[None]:
    """Starts Ray for Ray Train."""
    with own_ray(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "600")  # on a busy machine, a minute is not enough
        patch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # one process fewer
        yield


@contextmanager
def ray_on_two_hosts(
    directory: Path, num_cpus: tuple[int, int], **settings: str
) -> Iterator[tuple[list[Host], dict[str, str], str]]:
    """Starts Ray on two hosts, the second of which has the resource "far".

    Args:
        directory: Directory for the file of the hosts' names.
        num_cpus: Number of CPUs of each host.
        settings: Settings of Ray, as variables of the environment.

    Returns:
        The hosts, the environment of a program that uses this cluster, and Ray's directory.

    Raises:
        NoHostsError: If this machine does not permit network namespaces.
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
    short = f"/tmp/r{directory.stat().st_ino}"  # it has Ray's sockets, whose paths must be short
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


def assert_no_process_remains(pids: list[int]) -> None:
    """Fails unless the cluster has no workers, no placement groups, and all its CPUs."""
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
