"""Support for macOS and Windows, simulated by a Python without the features that these systems lack."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import REPOSITORY, clean_environment, kill_tree
from tests.wheel_check import NET

pytestmark = pytest.mark.processes

#: Python runs this code before a script, also in child processes. Torch and Lightning import their requirements of the
#: real system before the simulation begins.
PATCHED_SYSTEM = """
import os
import shutil
import socket
import sys
import tempfile
import types

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import multiprocessing.resource_sharer, multiprocessing.sharedctypes, multiprocessing.synchronize
import psutil, torch.distributed, torch.multiprocessing, torch.utils.data
import lightning.pytorch
import lightning.fabric.plugins.environments.mpi as mpi
import sysconfig

sysconfig.get_paths()
mpi._MPI4PY_AVAILABLE = False  # mpi4py searches for the system's MPI, whose absence is an error in Lightning 2.5.0

LACKING = {
    os: ["O_TMPFILE", "memfd_create", "pidfd_open", "sched_getaffinity"],
    socket: ["SOCK_SEQPACKET", "SO_PEERCRED", "MSG_NOSIGNAL"],
}
if SYSTEM == "win32":
    LACKING[os] += ["fork", "geteuid", "getuid", "killpg", "register_at_fork", "setsid", "uname"]
    LACKING[socket] += ["AF_UNIX", "MSG_DONTWAIT", "recv_fds", "send_fds"]
    for name in ("fcntl", "grp", "pwd", "resource", "termios"):
        sys.modules[name] = None
    torch.multiprocessing.get_all_start_methods = lambda: ["spawn"]
    shutil._winapi = types.SimpleNamespace(NeedCurrentDirectoryForExePath=lambda path: False)  # Python 3.12 calls it
for module, names in LACKING.items():
    for name in names:
        delattr(module, name)
tempfile._O_TMPFILE_WORKS = False  # tempfile checks this at its import
sys.platform = SYSTEM
"""

TRAINING = """
import os
import signal
import sys
import warnings

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")


def train(strategy, devices, **arguments):
    torch.manual_seed(0)
    model, rows = Net(), torch.randn(32, 4)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **{"max_epochs": 1, **arguments},
    )
    trainer.fit(model, DataLoader(TensorDataset(rows), batch_size=8))
    return [round(value, 5) for value in model.layer.weight.flatten().tolist()]


def refusal(strategy, devices=2, **arguments):
    try:
        train(strategy, devices, **arguments)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return "it trained"


import lightning_strategies_ext
"""


def run_on(system: str, script: str, directory: Path) -> list[str]:
    """Returns the lines that a script prints on the simulated system."""
    (directory / "sitecustomize.py").write_text(f"SYSTEM = {system!r}\n{PATCHED_SYSTEM}")
    (directory / "script.py").write_text(TRAINING + NET + script)
    environment = {**clean_environment(), "PYTHONPATH": f"{directory}{os.pathsep}{REPOSITORY}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "script.py"],
        env=environment,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=300)
    finally:
        kill_tree(process.pid)
    assert process.returncode == 0, output + errors
    return [line for line in output.splitlines() if not line.startswith("[Gloo]")]  # a message of torch 2.8


ON_ONE_PROCESS = """
import torch.distributed as dist
from lightning_strategies_ext import doctor

alone = train("auto", 1)
print(alone == train("dp_ext", 2), alone == train("ddp_ext", 1))
dist.destroy_process_group()
print(refusal("ddp_spawn_ext"))
print(doctor.environment_info()["shm"])
print({finding.name: finding.is_error for finding in doctor.examine() if finding.problem})
"""


def test_on_windows_strategies_without_workers_work_and_others_are_refused(tmp_path: Path):
    trained, refused, shm, problems = run_on("win32", ON_ONE_PROCESS, tmp_path)
    assert trained == "True True"
    assert refused.startswith("StrategyUnavailableError: `start_method='forkserver'` passes open files")
    assert "Use `strategy='ddp_ext'`" in refused
    assert shm == "requires Linux; gloo is used instead"
    assert eval(problems).keys() >= {"ddp_spawn_ext", "ddp_fork_ext", "ddp_notebook_ext"}
    assert not any(eval(problems).values())


ON_SEVERAL = """
class StopOnOne(pl.Callback):
    def on_train_batch_start(self, trainer, model, batch, index):
        if trainer.global_rank == trainer.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    import os
    import torch.distributed as dist

    if "LOCAL_RANK" not in os.environ:  # `ddp_ext` runs the script again
        alone = train("auto", 1)
        print(*(alone == train(strategy, 2) for strategy in ("dp_ext", "ddp_spawn_ext", "ddp_fork_ext")))
    weights = train("ddp_ext", 2)
    is_same = "LOCAL_RANK" in os.environ or weights == alone
    sys.stdout.write(f"{is_same} {dist.get_world_size()} {dist.get_backend()}\\n")  # at once, as two ranks write
    sys.stdout.write(refusal("ddp_ext", callbacks=[StopOnOne()], max_epochs=-1) + "\\n")
"""


def test_on_macos_ranks_communicate_over_gloo(tmp_path: Path):
    lines = run_on("darwin", ON_SEVERAL, tmp_path)
    assert "True True True" in lines
    assert lines.count("True 2 gloo") == 2  # on both ranks
    assert len([line for line in lines if line.startswith("SIGTERMException")]) == 2, lines
