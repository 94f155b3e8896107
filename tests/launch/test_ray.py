"""Requirements of ``ddp_ray_ext``, links of its workers, and its errors without Ray. These tests start no Ray."""

import hmac
import os
import pickle
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from lightning_strategies_ext import DDPRayStrategy
from lightning_strategies_ext._system.frames import FrameDecoder
from lightning_strategies_ext.launch.processes.process_settings import RemoteProcessSettings, RngState
from lightning_strategies_ext.launch.protocol import SendSignal
from lightning_strategies_ext.launch.ray import cluster, worker_link
from lightning_strategies_ext.launch.ray.cluster import ResourceDemand
from lightning_strategies_ext.launch.ray.worker_link import LinkServer, WorkerLink, decode_message
from tests.launch.link_connections import NUMBER, connect, wait_for
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import run_script, start_script
from tests.support.ray_clusters import needs_ray


@pytest.mark.parametrize(
    ("demand", "num_workers", "hosts"),
    [
        (ResourceDemand(), 2, [{"CPU": 2.0}]),
        (ResourceDemand(0.5), 4, [{"CPU": 2.0}]),
        (ResourceDemand(0.1), 10, [{"CPU": 1.0}]),
        (ResourceDemand(3, placement_strategy="SPREAD"), 2, [{"CPU": 4.0}, {"CPU": 4.0}]),
        (ResourceDemand(1, 0.5, {"fast": 1}), 2, [{"CPU": 4.0, "GPU": 1.0, "fast": 2.0, "memory": 1e9}]),
    ],
)
def test_a_demand_that_fits_is_accepted(demand, num_workers, hosts):
    demand.check_fits(num_workers, hosts, "the cluster")


@pytest.mark.parametrize(
    ("demand", "num_workers", "hosts", "message"),
    [
        (
            ResourceDemand(),
            3,
            [{"CPU": 2.0}],
            "`num_workers=3` .*`num_cpus_per_worker=1` need 3 CPUs, but it has 2[.]",
        ),
        (ResourceDemand(1, 1), 2, [{"CPU": 8.0}], "`num_gpus_per_worker=1` need 2 GPUs, but it has 0[.]"),
        (
            ResourceDemand(1, 0, {"fast": 2}),
            1,
            [{"CPU": 8.0, "fast": 1.0}],
            "'fast': 2.* need 2 of 'fast', but it has 1[.]",
        ),
        (
            ResourceDemand(3),
            2,
            [{"CPU": 4.0}, {"CPU": 2.0}],
            r"each need 3 CPUs do not fit .* 2 hosts can run 1 \+ 0 of",
        ),
    ],
)
def test_a_demand_that_does_not_fit_is_rejected_with_the_numbers(demand, num_workers, hosts, message):
    with pytest.raises(ValueError, match=message):
        demand.check_fits(num_workers, hosts, "it")


WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
from lightning.pytorch import Trainer
try:
    Trainer(strategy="ddp_ray_ext", accelerator="cpu", devices=2)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_variables_of_ray_and_of_the_host_are_not_sent_to_workers(monkeypatch):
    for name in ("RAY_AUTH_TOKEN", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR", "WANDB_API_KEY"):
        monkeypatch.setenv(name, f"value of {name}")
    sent = pickle.dumps(RemoteProcessSettings("/", dict(os.environ), RngState.now(), 1))
    assert b"value of WANDB_API_KEY" in sent
    assert sent.count(b"value of ") == 1


@needs_ray
@pytest.mark.parametrize("names", [None, ["*"], ["R*", "?DG_RUNTIME_DIR", "?ATH"], ["!OTHER"]])
def test_no_setting_sends_variables_of_ray_or_of_the_host(monkeypatch, names):
    unsent = ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS", "XDG_RUNTIME_DIR", "SSH_AUTH_SOCK", "KRB5CCNAME"]
    for name in (*unsent, "R_HOME"):
        monkeypatch.setenv(name, "1")
    strategy = DDPRayStrategy(1, parallel_devices=[torch.device("cpu")], environment_variables=names)
    environment = strategy._make_starter().environment()
    assert environment["R_HOME"] == "1"
    assert not environment.keys() & {*unsent, "PATH", "HOME"}


@needs_ray
@pytest.mark.parametrize(("names", "is_sent"), [([], True), (["WANDB_*"], True), (["!LIGHTNING_*"], False)])
def test_the_secret_of_a_job_is_sent_unless_it_is_denied(monkeypatch, names, is_sent):
    monkeypatch.setenv("LIGHTNING_STRATEGIES_EXT_SECRET", "1")
    strategy = DDPRayStrategy(1, parallel_devices=[torch.device("cpu")], environment_variables=names)
    assert ("LIGHTNING_STRATEGIES_EXT_SECRET" in strategy._make_starter().environment()) == is_sent


# --- links of workers ---


@contextmanager
def link_server(*numbers: int) -> Iterator[tuple[LinkServer, dict[int, WorkerLink]]]:
    server = LinkServer("127.0.0.1")
    try:
        yield server, {number: server.expect(number, lambda: None) for number in numbers}
    finally:
        server.close()


def test_unauthenticated_connections_delay_no_worker():
    with link_server(1) as (server, links), ExitStack() as stack:
        unauthenticated = [stack.enter_context(socket.create_connection(server.address)) for _ in range(40)]
        for connection in unauthenticated[:20]:
            connection.sendall(b"x")
        stack.enter_context(connect(server, 1))
        wait_for(lambda: links[1].connection is not None)
        for connection in unauthenticated:  # before their time limit
            assert len(connection.recv(32, socket.MSG_WAITALL)) == 32


def test_unauthenticated_connections_are_closed_in_time_and_a_worker_connects(monkeypatch):
    monkeypatch.setattr(worker_link, "_PROOF_S", 0.5)
    with link_server(1) as (server, links), ExitStack() as stack:
        unauthenticated = [stack.enter_context(socket.create_connection(server.address)) for _ in range(100)]
        stack.enter_context(connect(server, 1))
        wait_for(lambda: links[1].connection is not None)
        assert len(unauthenticated[0].recv(32, socket.MSG_WAITALL)) == 32
        assert unauthenticated[0].recv(1) == b""


@pytest.mark.parametrize(("number", "secret"), [(1, b"guessed"), (2, None)])
def test_a_connection_without_the_secret_or_with_an_unknown_number_is_closed(number: int, secret: bytes | None):
    with link_server(1) as (server, links), connect(server, number, secret) as connection:
        assert connection.recv(1) == b""
        assert links[1].connection is None


def test_the_secret_itself_is_no_proof():
    with link_server(1) as (server, links), socket.create_connection(server.address) as client:
        client.recv(32, socket.MSG_WAITALL)
        client.sendall(server.secret + NUMBER.pack(1))
        assert client.recv(1) == b""
        assert links[1].connection is None


def test_a_second_connection_does_not_replace_a_worker():
    with link_server(1) as (server, links), connect(server, 1) as worker:
        wait_for(lambda: links[1].connection is not None)
        with connect(server, 1) as second:
            assert second.recv(1) == b""
        links[1].send(SendSignal(12))
        (frame,) = FrameDecoder().decode(worker.recv(1 << 16))
        assert decode_message(*frame) == SendSignal(12)
        assert not links[1].closed.is_set()


@pytest.mark.processes
def test_a_worker_proves_that_it_has_the_secret_and_does_not_send_it():
    script = """
import sys
from lightning_strategies_ext.launch.ray.actor import MainLink
MainLink(("127.0.0.1", int(sys.argv[1])), bytes.fromhex(sys.argv[2]), 7)
"""
    secret, challenge = bytes(range(32)), b"c" * 32
    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker = start_script("-c", script, str(listener.getsockname()[1]), secret.hex())
        connection, _ = listener.accept()
        with connection:
            connection.sendall(challenge)
            received = connection.recv(36, socket.MSG_WAITALL)
        worker.communicate(timeout=60)
    assert received == hmac.digest(secret, challenge + NUMBER.pack(7), "sha256") + NUMBER.pack(7)


# --- errors ---


@pytest.mark.processes
def test_without_ray_creating_the_strategy_raises_an_error_with_the_command():
    result = run_script("-c", WITHOUT_RAY)
    assert result.returncode == 0, result.stdout
    assert "StrategyUnavailableError `strategy='ddp_ray_ext'` needs Ray" in result.stdout
    assert "pip install 'ray>=2.60,<3'" in result.stdout


@pytest.mark.parametrize(
    ("address", "mode", "is_named"),
    [("ray://head:10001", "", True), ("ray://head:10001", "token", False), ("head:6379", "", False)],
)
def test_an_unreachable_server_of_ray_client_is_reported_with_the_missing_token(
    monkeypatch, address: str, mode: str, is_named: bool
):
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    message = cluster.unreachable_message(address, ConnectionError("ray client connection timeout"))
    assert message.startswith(f"`address={address!r}`: no Ray cluster responds (ray client connection timeout). ")
    assert ("`RAY_AUTH_MODE=token` before Ray is imported" in message) is is_named


@needs_ray
@pytest.mark.parametrize(
    ("address", "failures", "attempts"), [("ray://head:1", 2, 3), ("ray://head:1", 9, 3), ("head:1", 9, 1)]
)
def test_connecting_is_retried_if_the_proxy_of_ray_client_starts_no_server(
    monkeypatch, address: str, failures: int, attempts: int
):
    import ray

    addresses = []

    def init(**arguments: object) -> None:
        addresses.append(arguments["address"])
        if len(addresses) <= failures:
            raise ConnectionAbortedError("Initialization failure from server: Starting Ray client server failed.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(cluster, "_this_session", lambda: "session")
    monkeypatch.setattr(cluster, "host_resources", lambda: [{"CPU": 2.0}])
    try:
        if failures < attempts:
            assert cluster.connect(address, ResourceDemand(1), 1, None)
        else:
            with pytest.raises(RuntimeError, match="Starting Ray client server failed"):
                cluster.connect(address, ResourceDemand(1), 1, None)
    finally:
        cluster.disconnect()
    assert addresses == [address] * attempts


@needs_ray
def test_a_demand_beyond_this_machine_is_rejected_before_ray_starts():
    import ray

    num_cpus = len(os.sched_getaffinity(0))
    trainer = make_trainer(DDPRayStrategy(1000, address="local"), devices=1)
    with pytest.raises(ValueError, match=rf"need 1000 CPUs, but this machine has {num_cpus}[.]"):
        trainer.fit(MLP(), loader())
    assert not ray.is_initialized()
