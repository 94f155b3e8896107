"""``ddp_ray_ext`` from outside of the cluster with Ray Client: the behavior of a main process inside the cluster."""

import gc
import importlib.util
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import psutil
import pytest

from lightning_strategies_ext import DDPRayStrategy
from lightning_strategies_ext.registry import StrategyUnavailableError
from tests.pytorch.test_ddp_ray import (  # noqa: F401  # each runs again here
    test_a_killed_worker_is_detected_at_once,
    test_a_signal_stops_all_ranks_and_their_state_is_returned,
    test_an_error_names_rank_host_and_cause_and_another_fit_works,
    test_large_tensors_are_returned_and_are_writable,
    test_no_actor_remains_in_the_cluster_after_the_workers_have_exited,
    test_ray_workers_train_as_spawned_workers_and_return_all_results,
    test_the_output_of_workers_is_printed_before_fit_returns,
    test_workers_are_reused_and_predictions_are_in_the_order_of_the_dataset,
)
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import REPOSITORY, clean_environment, free_port, kill_tree, start_command
from tests.support.ray_clusters import FOREVER_S, HALF, assert_no_process_remains, needs_ray

pytestmark = [
    pytest.mark.processes,
    needs_ray,
    pytest.mark.timeout(FOREVER_S),
    pytest.mark.skipif(importlib.util.find_spec("grpc") is None, reason="Ray Client needs pip install 'ray[client]'"),
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[str]:
    """Provides the address of a Ray Client server, to which this process is connected."""
    import ray

    port = free_port()
    environment = {
        **clean_environment(),
        "RAY_AUTH_MODE": "disabled",  # Ray Client sends a token only if RAY_AUTH_MODE was set before the import of Ray
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # makes Ray use the address 127.0.0.1
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "PYTHONPATH": str(REPOSITORY),
    }
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        head = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                *("--node-ip-address=127.0.0.1", "--port=0"),
                *(f"--ray-client-server-port={port}", "--num-cpus=2", "--include-dashboard=false"),
                f"--temp-dir={directory}",
            ],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            address = f"ray://127.0.0.1:{port}"
            for attempt in range(5):
                try:
                    ray.init(address, log_to_driver=False)  # retries for half a minute
                    break
                except ConnectionError:
                    if attempt == 4 or head.poll() is not None:
                        raise
            yield address
        finally:
            ray.shutdown()
            kill_tree(head.pid)
            head.wait()


KILLED = """
import os
import lightning.pytorch as pl
from lightning_strategies_ext import DDPRayStrategy
from tests.support.models import MLP, loader, make_trainer

class Waits(pl.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        print("pid", os.getpid(), flush=True)

trainer = make_trainer(DDPRayStrategy(num_cpus_per_worker=0.5), max_epochs=-1, callbacks=[Waits()])
trainer.fit(MLP(), loader())
"""


def test_workers_end_when_the_main_process_is_killed(cluster):
    environment = {
        "RAY_ADDRESS": cluster,
        "RAY_CLIENT_RECONNECT_GRACE_PERIOD": "5",  # seconds that Ray Client waits for a reconnection
        "RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S": "60",
        "RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S": "60",
    }
    program = start_command(sys.executable, "-c", KILLED, env=environment)
    try:
        pids: set[int] = set()
        output = ""
        while len(pids) < 2:
            line = program.stdout.readline()
            output += line
            assert line, f"the program ended with exit code {program.wait()} and printed:\n{output}"
            if line.startswith("pid "):
                pids.add(int(line.split()[1]))
        assert all(map(psutil.pid_exists, pids))
        program.send_signal(signal.SIGKILL)
    finally:
        kill_tree(program.pid)
        program.communicate()
    deadline = time.monotonic() + 120
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_link_relay_ends_when_the_main_process_sends_nothing():
    import ray
    from ray.exceptions import RayActorError

    from lightning_strategies_ext.launch.ray.actor import LinkRelayActor

    relay = ray.remote(LinkRelayActor).options(num_cpus=0).remote(1.0)

    def call_until_it_ends() -> None:
        while True:
            ray.get(relay.endpoint.remote())
            time.sleep(0.1)

    with pytest.raises(RayActorError):
        call_until_it_ends()


def test_workers_of_a_collected_trainer_exit_after_the_interrupted_call(cluster):
    from ray.util.client import ray as client

    trainer = make_trainer(DDPRayStrategy(**HALF), max_epochs=1)
    trainer.fit(MLP(), loader())
    pids = trainer.strategy.launcher.pids
    assert len(pids) == 2
    with client.get_context().client_worker.data_client.lock:  # as in a call that triggers a garbage collection
        del trainer
        gc.collect()
    assert_no_process_remains(pids)


def test_an_error_names_the_missing_requirement_of_ray_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(StrategyUnavailableError, match=r"pip install 'ray\[client\]'"):
        DDPRayStrategy(address="ray://127.0.0.1:1")


def test_another_address_is_refused_where_the_process_is_connected(cluster):
    trainer = make_trainer(DDPRayStrategy(**HALF, address="127.0.0.1:1"))
    with pytest.raises(ValueError, match=r"is already connected to the Ray cluster at "):
        trainer.fit(MLP(), loader())
