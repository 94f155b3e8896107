"""gloo's listeners after the ranks have connected, its network interface, and connections from another user."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_strategies_ext._system import gloo_connections
from lightning_strategies_ext._system.gloo_connections import restrict_gloo
from lightning_strategies_ext.torch_distributed import process_group
from lightning_strategies_ext.torch_distributed.compression.host_groups import HostGroups
from tests.support.ranks import REPOSITORY, run_command, run_ranks

OTHER_USER = 65_500
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="restricts gloo on Linux only")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user, and mount a file")


def listening() -> list[tuple[str, int]]:
    """Returns the addresses at which this process listens."""
    sockets = psutil.Process().net_connections("tcp")
    return sorted(tuple(each.laddr) for each in sockets if each.status == psutil.CONN_LISTEN)


def connected() -> list[str]:
    """Returns the addresses of this process in its TCP connections."""
    sockets = psutil.Process().net_connections("tcp")
    return [each.laddr.ip for each in sockets if each.status == psutil.CONN_ESTABLISHED]


def can_connect(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=0.5).close()
    except OSError:
        return False
    return True


def connect_and_exchange(backend: str, restricted: bool) -> tuple[int, list[float]]:
    """Returns the number of ports at which this rank listens, and what it has received."""
    rank, size, timeout = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=60)
    environment = LightningEnvironment()
    environment.set_global_rank(rank)
    environment.set_world_size(size)
    levels = None
    if restricted:
        process_group.start(environment, backend, torch.device("cpu"), timeout)
        levels = HostGroups.create(torch.device("cpu"), timeout)  # a separate group
    else:
        dist.init_process_group(backend, rank=rank, world_size=size)
    ports = [address for address in listening() if address != (os.environ["MASTER_ADDR"], environment.main_port)]
    sent, received = torch.arange(float(size)) + 10 * rank, torch.empty(size)
    dist.all_to_all_single(received, sent)
    dist.barrier()
    if levels is not None:
        levels.sum_all([received])
        levels.close()
    dist.destroy_process_group()
    return len(ports), received.tolist()


@pytest.mark.processes
@pytest.mark.parametrize(("backend", "size"), [("gloo", 3), ("shm", 3), ("gloo", 1)])
def test_no_rank_listens_for_gloo_after_the_ranks_have_connected(backend: str, size: int):
    for num_ports, received in run_ranks(connect_and_exchange, backend, True, world_size=size):
        assert num_ports == 0
        assert received == [sum(10 * sender + rank for rank in range(size)) for sender in range(size)]


@pytest.mark.processes
def test_without_a_restriction_ranks_listen_for_gloo():
    """Verifies that the test above can fail."""
    assert all(num_ports > 0 for num_ports, _ in run_ranks(connect_and_exchange, "gloo", False, world_size=2))


def listen_beside_gloo() -> list[bool]:
    """Opens a listener in the same block, like a user's server in another thread."""
    rank, size = int(os.environ["LOCAL_RANK"]), 2
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=rank == 0)
    with restrict_gloo(is_one_host=True):
        server = socket.create_server(("127.0.0.1", 0))
        group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
    connected = [can_connect(server.getsockname())]
    group.barrier().wait()
    return connected


@pytest.mark.processes
def test_other_servers_of_the_process_accept_connections():
    assert run_ranks(listen_beside_gloo, world_size=2) == [[True], [True]]


AS_RANK = """
import os, sys
from datetime import timedelta
import torch.distributed as dist
from lightning_strategies_ext._system.gloo_connections import restrict_gloo

rank, user = int(sys.argv[1]), int(sys.argv[2])
if user:
    os.setgroups([]); os.setgid(user); os.setuid(user)
try:
    with restrict_gloo(is_one_host=True):
        group = dist.ProcessGroupGloo(dist.FileStore(sys.argv[3], 2), rank, 2, timedelta(seconds=60))
except PermissionError as error:
    print(error)
sys.stdin.read()
"""


@pytest.fixture
def accessible_path() -> Iterator[Path]:
    """A directory that other users can enter; another session of pytest may close the parents of ``tmp_path``."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.mark.processes
@needs_root
def test_a_process_of_another_user_that_claims_a_rank_is_rejected(accessible_path: Path):
    store = accessible_path / "store"
    store.touch()
    store.chmod(0o666)
    command = [sys.executable, "-c", AS_RANK]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": REPOSITORY}
    with (
        subprocess.Popen([*command, "1", str(OTHER_USER), str(store)], **pipes) as other_process,
        subprocess.Popen([*command, "0", "0", str(store)], **pipes) as rank,
    ):
        assert rank.stdout is not None
        reported = rank.stdout.readline()  # both processes keep their connections until the message has arrived
        rank.communicate()
        other_process.communicate()
    assert f"leads to a process of user {OTHER_USER} instead of user 0" in reported
    assert "Restart the job" in reported


PRINT_ADDRESSES = """
import json, os
from lightning.fabric import Fabric
from tests._system.test_gloo_connections import connected

fabric = Fabric(strategy="ddp_ext", accelerator="cpu", devices=2)
fabric.launch()
os.write(1, f"connected {json.dumps(connected())}\\n".encode())  # one write, because the ranks share a pipe
"""


@pytest.mark.processes
@needs_root
@pytest.mark.parametrize(("interface", "expected"), [("", "127.0.0.1"), ("eth-test", "")], ids=["default", "named"])
def test_ranks_of_one_host_use_the_loopback_interface_for_any_hostname(interface: str, expected: str, tmp_path: Path):
    hosts, script = tmp_path / "hosts", tmp_path / "job.py"
    hosts.write_text(f"127.0.0.1 localhost\n127.0.0.2 {socket.gethostname()}\n")
    script.write_text(PRINT_ADDRESSES)
    mount = f"mount --bind {hosts} /etc/hosts && exec {sys.executable} {script}"
    env = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    ran = run_command("unshare", "--mount", "sh", "-c", mount, env=env, cwd=REPOSITORY)
    if "unshare: " in ran.stdout or "mount: " in ran.stdout:
        pytest.skip(f"no file can be mounted: {ran.stdout.splitlines()[-1]}")
    if not expected:
        assert f"Unable to find address for: {interface}" in ran.stdout, "the user's choice is kept"
        return
    assert ran.returncode == 0, ran.stdout
    printed = re.findall(r"connected (\[[^]]*\])", ran.stdout)
    assert len(printed) == 2, ran.stdout
    assert {address for addresses in printed for address in json.loads(addresses)} == {expected}, ran.stdout


def test_the_loopback_interface_is_found():
    assert gloo_connections.loopback_interface() in psutil.net_if_addrs()
