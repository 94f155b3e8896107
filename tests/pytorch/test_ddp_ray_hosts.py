"""``ddp_ray_ext`` on two hosts with a raylet each: a program trains on both hosts, and detects remote failures.

The hosts are two network namespaces, see :mod:`tests.support.namespace_hosts`. The test is skipped, with the reason, on
a machine that permits no namespaces.
"""

import json
import sys

import pytest

from tests.support.namespace_hosts import NoHostsError
from tests.support.ranks import run_command
from tests.support.ray_clusters import FOREVER_S, PROGRAM_S, needs_ray, ray_on_two_hosts

pytestmark = [pytest.mark.processes, needs_ray, pytest.mark.timeout(FOREVER_S)]

PROGRAM = """
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import psutil
import ray
import torch

from lightning_strategies_ext import DDPRayStrategy
from tests.support.ddp_spawn_trainers import seeded
from tests.support.models import loader, make_trainer, state_of

directory, ray_directory = Path(sys.argv[1]), sys.argv[2]
found = {}


class Looks(pl.Callback):  # in `__main__`
    seen = None

    def on_train_start(self, trainer, pl_module):
        strategy = trainer.strategy
        mine = (trainer.global_rank, trainer.local_rank, trainer.node_rank, strategy.num_processes, os.uname().nodename)
        seen = [None] * trainer.world_size
        torch.distributed.all_gather_object(seen, mine)
        self.seen = seen, torch.distributed.get_backend(), os.environ["MASTER_ADDR"]


class KillsRaylet(pl.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 3 and trainer.global_rank == 2:
            of_host = f"--node_ip_address={ray.util.get_node_ip_address()}"
            for process in psutil.process_iter(["name", "cmdline"]):
                command = process.info["cmdline"] or []
                if process.info["name"] == "raylet" and of_host in command and ray_directory in " ".join(command):
                    process.kill()


def on_ray(*args, callbacks=(), **kwargs):
    strategy = DDPRayStrategy(*args, **kwargs, address="auto")
    return make_trainer(strategy, devices=1, max_epochs=1, callbacks=[*callbacks])


hidden = directory / "hidden"  # private to this program: the other host does not see its files
hidden.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", hidden], check=True)
writes = {"default_root_dir": hidden, "enable_checkpointing": True}
strategy = DDPRayStrategy(1, address="auto", resources_per_worker={"far": 0.5})
try:
    make_trainer(strategy, devices=1, max_epochs=1, **writes).fit(seeded(), loader())
except Exception as error:
    found["hidden"] = str(error)

looks = Looks()
trainer = on_ray(3, callbacks=[looks])
model = seeded()
trainer.fit(model, loader(60, batch_size=4, shuffle=True))
found["seen"] = looks.seen
outputs = torch.cat(trainer.predict(model, loader(31)))
with torch.no_grad():
    expected = model.eval().net(next(iter(loader(31, batch_size=31)))[0])
found["in order"] = torch.allclose(outputs, expected, atol=1e-6)
found["steps"] = trainer.global_step

other = make_trainer("ddp_fork_ext", devices=3, max_epochs=1)
same = seeded()
other.fit(same, loader(60, batch_size=4, shuffle=True))
differing = [name for name, tensor in state_of(model).items() if not torch.allclose(tensor, state_of(same)[name])]
found["as forked"] = differing
other.strategy.close()

trainer = on_ray(3, callbacks=[KillsRaylet()])
try:
    trainer.fit(seeded(), loader(120))
except Exception as error:
    found["killed"] = [type(error).__name__, str(error)]
(directory / "found").write_text(json.dumps(found))
"""


def test_workers_of_two_hosts_train_together_and_are_monitored(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    try:
        with ray_on_two_hosts(tmp_path, (2, 1)) as (hosts, environment, short):
            program = run_command(
                *hosts[0].enter(),
                sys.executable,
                tmp_path / "program.py",
                tmp_path,
                short,
                env=environment,
                timeout_s=PROGRAM_S,
            )
            names = [host.name for host in hosts]
    except NoHostsError as error:
        pytest.skip(str(error))
    assert (tmp_path / "found").exists(), program.stdout
    found = json.loads((tmp_path / "found").read_text())
    seen, backend, main_address = found["seen"]
    assert seen == [[0, 0, 0, 2, names[0]], [1, 1, 0, 2, names[0]], [2, 0, 1, 1, names[1]]]
    assert backend == "shm"
    assert main_address == "10.113.97.1"
    assert found["steps"] == 5
    assert found["in order"]
    assert found["as forked"] == []
    assert f"Rank 0 on {names[1]} does not see the main process's directory" in found["hidden"]
    kind, message = found["killed"]
    assert kind == "WorkerDiedError", message
    assert "on 10.113.97.2) exited" in message
    assert "rank 2 (pid" in message
