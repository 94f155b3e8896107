"""Containers and hardened hosts: features that the kernel or a mount denies are replaced, or a message names them."""

import os
import re
import sys
import time
from pathlib import Path

import pytest

from tests.support.hardened_hosts import NOT_DUMPABLE, run_hardened

SCRIPT = """
import os, signal, sys
if "NOT_DUMPABLE" in os.environ:
    exec(os.environ["NOT_DUMPABLE"])
import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset

class Net(BoringModel):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(RandomDataset(32, 16), batch_size=2)

    def training_step(self, batch, index):
        marker = os.environ.get("MARKER")
        if marker and index == 2 and self.trainer.global_rank == 1 and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, index)

if __name__ == "__main__":
    pl.seed_everything(1)
    net = Net()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=sys.argv[1], max_epochs=1, limit_val_batches=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(net)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"trained {trainer.global_step} {net.layer.weight.abs().sum().item():.4f}", flush=True)
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def trained(output: str) -> str:
    [line] = re.findall(r"^trained .*", output, re.MULTILINE) or [output]
    return line


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return trained(run_hardened(sys.executable, path, "ddp_fork_ext", conditions="").stdout)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("conditions", "strategy"),
    [
        ("no_proc", "ddp_ext"),
        ("no_proc", "ddp_spawn_ext"),
        ("no_proc", "ddp_fork_ext"),
        ("no_proc no_pidfd no_memfd full_shared_memory read_only_home", "ddp_spawn_elastic_ext"),
        ("proc_of_processes_only no_capabilities", "ddp_ext"),
        ("no_pidfd no_memfd read_only_shared_memory", "ddp_spawn_ext"),
    ],
)
def test_two_ranks_train_as_everywhere(conditions: str, strategy: str, script: Path, weights: str, tmp_path: Path):
    home = {"HOME": str(tmp_path)} if "read_only_home" in conditions else {}
    result = run_hardened(sys.executable, script, strategy, conditions=conditions, **home)
    assert trained(result.stdout) == weights
    assert "Traceback" not in result.stdout


@pytest.mark.processes
@pytest.mark.parametrize("conditions", ["full_shared_memory", "no_proc"])
def test_a_backend_that_needs_a_file_store_creates_one(conditions: str, script: Path, weights: str):
    strategy = 'lse.DDPSpawnStrategy(start_method="fork", process_group_backend="cpu:gloo")'
    script.write_text("import lightning_strategies_ext as lse\n" + SCRIPT.replace("sys.argv[1]", strategy))
    assert trained(run_hardened(sys.executable, script, conditions=conditions).stdout) == weights


@pytest.mark.processes
def test_ranks_that_other_processes_cannot_inspect_train(script: Path, weights: str):
    conditions = "hidden_processes no_capabilities"
    result = run_hardened(sys.executable, script, "ddp_spawn_ext", conditions=conditions, NOT_DUMPABLE=NOT_DUMPABLE)
    assert trained(result.stdout) == weights
    assert "Traceback" not in result.stdout


@pytest.mark.processes
@pytest.mark.parametrize(
    ("conditions", "strategy"),
    [
        ("no_proc", "ddp_ext"),
        ("no_pidfd", "ddp_spawn_ext"),
        ("hidden_processes no_capabilities", "ddp_ext"),
    ],
)
def test_the_exit_of_a_rank_terminates_the_others_at_once(conditions: str, strategy: str, script: Path, tmp_path: Path):
    env = {"NOT_DUMPABLE": NOT_DUMPABLE} if "hidden" in conditions else {}
    result = run_hardened(
        sys.executable, script, strategy, conditions=conditions, MARKER=str(tmp_path / "killed"), **env
    )
    assert result.returncode != 0
    assert re.search("rank 1 on .* failed first, last seen in train, epoch 0, step", result.stdout), result.stdout
    assert "SIGKILL" in result.stdout


@pytest.mark.processes
@pytest.mark.parametrize("conditions", ["no_proc", "no_pidfd no_memfd full_shared_memory"])
def test_a_rank_that_torchrun_starts_again_finds_its_commit(conditions: str, script: Path, tmp_path: Path):
    result = run_hardened(
        *TORCHRUN, script, "ddp_elastic_ext", conditions=conditions, MARKER=str(tmp_path / "killed"),
        LIGHTNING_STRATEGIES_EXT_CACHE_DIR=str(tmp_path / "cache"),
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    assert "from the commit at step 0" in result.stdout
    assert trained(result.stdout).startswith("trained 4 ")
    if "no_memfd" in conditions:
        assert result.stdout.count("Commits are stored in unnamed files in") == 1, result.stdout
    deadline = time.monotonic() + 20
    while remaining := os.listdir(tmp_path / "cache" / "fd-stores"):  # until the descriptor store has exited
        assert time.monotonic() < deadline, remaining
        time.sleep(0.1)


IN_PROCESS = """
import os, signal, socket, subprocess, sys, time
import psutil
from lightning_strategies_ext._system import connections, peers

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
started = peers.start_time(child.pid)
assert peers.is_running(child.pid, started)
peers.kill_with_forked_children(child.pid)
while peers.is_running(child.pid, started):  # until it is a zombie
    time.sleep(0.01)
assert child.wait() == -signal.SIGKILL
assert not peers.is_running(child.pid, started)

listening = socket.create_server(("127.0.0.1", 0))
one = socket.create_connection(listening.getsockname())
other, _ = listening.accept()
connections.exempt(other)
connections.shut_down_connections(lambda each: bool(each.raddr) and each.raddr.port == listening.getsockname()[1])
assert other.recv(1) == b""
print("all right")
"""


@pytest.mark.processes
@pytest.mark.parametrize("conditions", ["no_proc", "no_proc no_pidfd"])
def test_processes_and_connections_are_known_without_proc(conditions: str):
    result = run_hardened(sys.executable, "-c", IN_PROCESS, conditions=conditions, timeout_s=60)
    assert result.stdout.splitlines()[-1] == "all right", result.stdout
