"""Access to the store of ranks of one host: other users, other jobs, and the ports on which ranks listen."""

import json
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_strategies_ext import host_store, host_store_server
from lightning_strategies_ext.host_store import HostStore
from lightning_strategies_ext.torch_distributed import process_group, rendezvous
from tests.support.ranks import REPOSITORY, run_ranks, run_script
from tests.test_host_store import serving_process

OTHER_USER = 65_500
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def store() -> HostStore:
    return host_store.serve(host_store.new_name())


def as_another_user(program: str, *args: str) -> "subprocess.CompletedProcess[str]":
    become = f"import os; os.setgroups([]); os.setgid({OTHER_USER}); os.setuid({OTHER_USER})\n"
    imported = "import sys, torch.distributed as dist; from lightning_strategies_ext import host_store\n"
    command = [sys.executable, "-c", imported + become + program, *args]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.processes
@needs_root
def test_another_user_can_neither_read_nor_write_the_store(store: HostStore):
    store.set("token", "secret")
    took = as_another_user("s = host_store.connect(sys.argv[1]); print(s.get('token'))", store.name)
    assert "is served by user 0, but this process belongs to user 65500" in took.stderr
    raw = "host_store.is_of_this_user = lambda connection: True; s = host_store.connect(sys.argv[1]);"
    for request in ("print(s.get('token'))", "s.set('token', 'other')", "s.delete_key('token')"):
        took = as_another_user(raw + request, store.name)
        assert "DistNetworkError" in took.stderr, took
        assert not took.stdout
    assert store.get("token") == b"secret"


@pytest.mark.processes
@needs_root
def test_a_rank_sends_nothing_to_a_store_of_another_user():
    name = host_store.new_name()
    program = (
        "import os, sys\nfrom lightning_strategies_ext import host_store\n"
        f"os.setgid({OTHER_USER}); os.setuid({OTHER_USER})\n"
        "host_store.is_of_this_user = lambda connection: True\n"
        "host_store.serve(sys.argv[1]); print('ready', flush=True); sys.stdin.read()"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program, name], cwd=REPOSITORY, **pipes) as impostor:
        assert impostor.stdout.readline() == "ready\n"
        with pytest.raises(dist.DistNetworkError, match="served by user 65500, but this process belongs to user 0"):
            host_store.connect(name).set("token", "secret")
        impostor.stdin.close()


IMPOSTOR = f"""
import os, socket, sys
os.setgroups([]); os.setgid({OTHER_USER}); os.setuid({OTHER_USER})
listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listening.bind("\\0" + sys.argv[1])
listening.listen(0)
waiting = []
try:
    while True:
        waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        waiting[-1].setblocking(False)
        waiting[-1].connect("\\0" + sys.argv[1])
except BlockingIOError:
    print("full", flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
@needs_root
def test_another_user_that_takes_the_name_of_an_ended_store_does_not_delay_a_rank():
    with serving_process() as (store, server):
        store.set("key", "value")
        server.kill()
        server.wait()
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        name = host_store_server.address(store.name)[1:]
        with subprocess.Popen([sys.executable, "-c", IMPOSTOR, name], **pipes) as impostor:
            assert impostor.stdout is not None
            assert impostor.stdin is not None
            assert impostor.stdout.readline() == "full\n"
            with pytest.raises(dist.DistNetworkError, match="has ended"):
                store.get("key")  # over the existing connection
            store.set_timeout(timedelta(seconds=1))
            with pytest.raises(dist.DistStoreError, match="No process served the store of these ranks within 1 s"):
                store.get("key")
            impostor.stdin.close()


def join_by_a_name_of_another_job(name: str) -> str:
    """Joins in ranks of another launcher, which read a name that another user has written."""
    rendezvous._HOST_STORE = "rank 0 writes elsewhere" if os.environ["LOCAL_RANK"] == "0" else "host_store"
    environment = LightningEnvironment()
    environment.set_global_rank(environment.local_rank())
    environment.set_world_size(2)
    serve = rendezvous._store_at_address

    def store_with_name(rank: int, *args: Any) -> dist.Store:
        store = serve(rank, *args)
        store.set("host_store", f"{name} ranks")
        return store

    rendezvous._store_at_address = store_with_name
    with pytest.raises((dist.DistStoreError, dist.DistNetworkError)) as raised:
        process_group.start(environment, "gloo", torch.device("cpu"), timedelta(seconds=5))
    return str(raised.value)


@pytest.mark.processes
def test_ranks_do_not_write_to_the_store_of_another_job_whose_name_they_are_given(store: HostStore):
    first, second = run_ranks(join_by_a_name_of_another_job, store.name)
    assert "rank 1 to join" in first
    assert "ranks/job" in second
    assert store.list_keys() == []
    store.set("ranks/job", "port 1, run -")
    first, second = run_ranks(join_by_a_name_of_another_job, store.name)
    assert "rank 1 to join" in first
    assert "another job's store (port 1, run -; this is port " in second
    assert store.list_keys() == ["ranks/job"]


JOB = """
import sys
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from tests.support.models import MLP, loader
from tests.test_host_store_access import report

class Model(MLP):
    def on_train_end(self):
        report(self.global_rank)

def run(fabric):
    report(fabric.global_rank)

if __name__ == "__main__":
    for name in sys.argv[1:]:
        if name.startswith("fabric:"):
            name = name.partition(":")[2]
            fabric = Fabric(strategy=name, accelerator="cpu", devices=2)
            fabric.launch(run)
        else:
            quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
            Trainer(strategy=name, accelerator="cpu", devices=2, max_steps=2, **quiet).fit(Model(), loader())
"""


def report(rank: int) -> None:
    """Prints the sockets at which this process listens, as JSON, and the keys of the store of another launcher."""
    connections = psutil.Process().net_connections("tcp")
    found = sorted(each.laddr for each in connections if each.status == psutil.CONN_LISTEN)
    sys.stdout.write(f"\nlistens {json.dumps([rank, [tuple(address) for address in found]])}\n")
    if "TORCHELASTIC_RUN_ID" in os.environ and hasattr(dist.Store, "list_keys"):
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        sys.stdout.write(f"keys {json.dumps(store.list_keys())}\n")
    sys.stdout.flush()


LAUNCHED = ["ddp_spawn_ext", "ddp_fork_ext", "ddp_spawn_elastic_ext", "fabric:ddp_spawn_ext"]


@pytest.mark.processes
@pytest.mark.parametrize("names", [LAUNCHED, ["ddp_ext"], ["fabric:ddp_ext"], ["horovod_ext"]], ids=" ".join)
def test_ranks_started_on_one_host_listen_on_the_loopback_interface_only(names: list[str], tmp_path: Path):
    script = tmp_path / "job.py"
    script.write_text(JOB)
    ran = run_script(str(script), *names)
    assert ran.returncode == 0, ran.stderr
    listeners = [json.loads(line) for line in re.findall(r"listens (\[.*\])", ran.stdout)]
    assert sorted(rank for rank, _ in listeners) == sorted([0, 1] * len(names)), ran.stdout
    for (
        rank,
        addresses,
    ) in listeners:  # Horovod's gloo, and on rank 0 its rendezvous; torch's gloo has closed its listeners
        assert len(addresses) <= (0 if names != ["horovod_ext"] else 2 if rank == 0 else 1), listeners
        assert {address for address, _ in addresses} <= {"127.0.0.1"}, listeners


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(dist.Store, "list_keys"), reason="this torch does not list the keys of a store")
def test_the_store_of_torchrun_contains_only_the_name_of_the_host_store(tmp_path: Path):
    script = tmp_path / "job.py"
    script.write_text(JOB)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = run_script(*torchrun, str(script), "ddp_ext")
    assert ran.returncode == 0, ran.stdout
    (keys, _) = (json.loads(line) for line in re.findall(r"keys (\[.*\])", ran.stdout))
    own_keys = {
        re.sub("[0-9a-f]{32}", "ID", key.rpartition("lightning_strategies_ext/")[2]) for key in keys if "ext" in key
    }
    assert own_keys == {"restarts/newest", "restarts/ID/request 1", "restarts/ID/reply 1", "host_store"}, keys
