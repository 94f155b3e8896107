"""Ranks that torchrun restarts, with ``ddp_elastic_ext``: ``fit`` continues from the memory of the host.

Each run trains on digits for as many epochs as an uninterrupted run, counts every sample, and must be as accurate.
"""

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from lightning_strategies_ext import DDPElasticStrategy
from lightning_strategies_ext._system import user_cache
from lightning_strategies_ext.elastic import fd_store
from lightning_strategies_ext.elastic.commit import CommitTooLargeError
from lightning_strategies_ext.elastic.commit_state import TensorPlaceholder
from lightning_strategies_ext.elastic.fd_store import RUN_ID_VARIABLE, TorchrunJob
from lightning_strategies_ext.elastic.memfd_commit import CommitFile, reserve, tensor_offsets
from lightning_strategies_ext.registry import StrategyUnavailableError
from tests.support.elastic_runs import STRATEGY, Run, check_is_as_accurate_as_uninterrupted, run_torchrun
from tests.support.elastic_script import NUM_EPOCHS, Net, kill, once, terminate
from tests.support.ranks import kill_tree, run_command, start_script

#: The first layers are frozen in the first epoch.
UNFREEZING = {"strategy": STRATEGY, "unfreezes_at": 1}


@pytest.fixture(scope="module")
def uninterrupted() -> Run:
    return run_torchrun(2, **UNFREEZING)


def check_matches_uninterrupted(run: Run, uninterrupted: Run) -> None:
    """Checks that weights and epoch means are bitwise identical, which includes dropout and the order of samples."""
    assert run.ends[0]["weights"] == uninterrupted.ends[0]["weights"]
    assert run.logged() == uninterrupted.logged()


@pytest.mark.processes
def test_rank_0_is_killed_then_the_other_in_validation_and_each_with_loader_workers(uninterrupted):
    first, second = once(kill, rank=0, step=70), once(kill, rank=1, step=100, during="validation")
    run = run_torchrun(2, first, second, num_workers=1, **UNFREEZING)
    check_is_as_accurate_as_uninterrupted(run)
    check_matches_uninterrupted(run, uninterrupted)
    assert run.worlds == [(2, 0), (2, 60), (2, 120)]
    assert "with 2 ranks (0 new) from the commit at step 60; 10 steps are repeated" in run.output


@pytest.mark.processes
def test_two_ranks_are_killed_at_once_with_accumulation_and_a_policy():
    run = run_torchrun(
        3,
        *(once(kill, rank=rank, step=35) for rank in (0, 2)),
        strategy={"commit_every_n_steps": 10},
        trainer={"accumulate_grad_batches": 2, "max_epochs": 2 * NUM_EPOCHS},
        policy={"KeepGlobalBatch": {}},
    )
    check_is_as_accurate_as_uninterrupted(run, num_epochs=2 * NUM_EPOCHS)
    # On a busy machine, torchrun may terminate a rank before step 35. The rank is then killed in the next world.
    assert run.worlds in ([(3, 0), (3, 30)], [(3, 0), (3, 30), (3, 30)])


def kill_the_restarted_rank_1(net: Net, at: str) -> None:
    if at == "setup" and net.global_rank == 1 and net.is_replacement and net.first("kill again"):
        kill(net)


@pytest.mark.processes
def test_manual_optimization_survives_a_kill_in_a_commit_and_one_before_the_rejoin():
    first = once(kill, rank=1, step=60, during="commit")
    strategy = {**STRATEGY, "process_group_backend": "gloo"}
    run = run_torchrun(2, first, kill_the_restarted_rank_1, strategy=strategy, is_manual=True)
    check_is_as_accurate_as_uninterrupted(run)
    assert run.worlds[0] == (2, 0)
    assert run.worlds[1][1] in (40, 60)  # the other rank may have completed the commit at step 60


@pytest.mark.processes
def test_a_sigterm_to_one_rank_lets_all_ranks_commit_before_the_restart(uninterrupted):
    run = run_torchrun(2, once(terminate, rank=1, step=70), **UNFREEZING)
    check_is_as_accurate_as_uninterrupted(run)
    check_matches_uninterrupted(run, uninterrupted)
    assert len(run.worlds) == 2
    assert run.worlds[1][1] >= 70
    assert "; 0 steps are repeated" in run.output, run.output


@pytest.mark.processes
def test_after_a_loss_before_the_first_step_training_starts_again():
    run = run_torchrun(2, once(kill, rank=1, during="setup"), strategy=STRATEGY)
    check_is_as_accurate_as_uninterrupted(run)
    assert run.worlds == [(2, 0)]


def kill_with_store(net: Net) -> None:
    """Kills the descriptor store and this rank."""
    job = TorchrunJob.this_process()
    assert job is not None
    for process in stores_below(job.address_file):
        process.kill()
    kill(net)


@pytest.mark.processes
def test_without_commits_training_continues_from_disk():
    run = run_torchrun(2, once(kill_with_store, rank=0, step=100), strategy=STRATEGY, ckpt_path="last")
    check_is_as_accurate_as_uninterrupted(run)
    assert run.worlds == [(2, 0), (2, 90)]  # the end of the second epoch
    assert "No host has a commit of this `fit`" in run.output


def kill_rank_1_in_validate(net: Net, at: str) -> None:
    is_in_validate = at == "validation" and net.trainer.state.fn == "validate"
    if is_in_validate and net.global_rank == 1 and net.first("kill"):
        kill(net)


@pytest.mark.processes
def test_after_a_loss_in_a_later_stage_no_step_is_repeated():
    run = run_torchrun(2, kill_rank_1_in_validate, strategy=STRATEGY, again=True)
    check_is_as_accurate_as_uninterrupted(run)
    assert run.worlds == [(2, 0), (2, 0)]  # the last world is that of a second `fit`
    assert len({line["pid"] for line in run.lines}) == 4


TERMINATED_LATE = """
import os
import signal

from lightning_strategies_ext import DDPElasticStrategy
from tests.support.models import MLP, loader, make_trainer


class Terminated(MLP):
    def training_step(self, batch, batch_idx):
        if self.trainer.is_last_batch:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    strategy = DDPElasticStrategy()
    trainer = make_trainer(strategy, max_epochs=1, devices=1)
    trainer.fit(Terminated(), loader())
    print("fit has ended", flush=True)
    trainer.validate(MLP(), loader(), verbose=False)
    print("validate has ended", flush=True)
"""


@pytest.mark.processes
def test_a_sigterm_in_the_last_step_stops_the_next_stage(tmp_path: Path):
    (tmp_path / "script.py").write_text(TERMINATED_LATE)
    run_id = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --rdzv-id={tmp_path.name}"
    options = f"--nproc-per-node=1 --max-restarts=0 --monitor-interval=0.1 {run_id} --no-python"
    script = sys.executable, tmp_path / "script.py"
    result = run_command(sys.executable, "-m", "torch.distributed.run", *options.split(), *script)
    assert "fit has ended" in result.stdout, result.stdout
    assert "validate has ended" not in result.stdout


OMITS_WEIGHTS = """
import os
import signal
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_strategies_ext import DDPElasticStrategy
from tests.support.models import loader, make_trainer

directory = Path(sys.argv[1])


class OmitsFrozen(pl.LightningModule):
    strict_loading = False

    def __init__(self):
        super().__init__()
        torch.seed()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("scale", torch.rand(3), persistent=False)
        self.net = nn.Parameter(torch.zeros(1))

    def state_dict(self, *args, **kwargs):
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "frozen" not in name}

    def on_train_start(self):
        self.extra = nn.Parameter(torch.zeros(1))
        self.trainer.optimizers[0].add_param_group({"params": [self.extra], "lr": 1.0})

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 3 and self.global_rank == 1 and not (directory / "killed").exists():
            (directory / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        omitted = [*self.frozen.weight.flatten().tolist(), *self.scale.tolist()]
        with (directory / "seen").open("a") as file:
            print(self.trainer.global_step, self.net.item(), self.extra.item(), omitted, sep=";", file=file)
        return self.net.sum() + self.extra.sum()

    def configure_optimizers(self):
        return torch.optim.SGD([self.net], lr=1.0)


if __name__ == "__main__":
    strategy = DDPElasticStrategy(commit_every_n_steps=1)
    make_trainer(strategy, max_epochs=1).fit(OmitsFrozen(), loader())
"""


@pytest.mark.processes
def test_omitted_frozen_weights_and_layers_added_in_on_train_start_are_restored(tmp_path: Path):
    (tmp_path / "script.py").write_text(OMITS_WEIGHTS)
    run_id = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --rdzv-id={tmp_path.name}"
    options = f"--nproc-per-node=2 --max-restarts=1 --monitor-interval=0.1 {run_id} --no-python"
    script = sys.executable, tmp_path / "script.py", tmp_path
    result = run_command(sys.executable, "-m", "torch.distributed.run", *options.split(), *script)
    assert result.returncode == 0, result.stdout
    assert "from the commit at step 3; 0 steps are repeated" in result.stdout
    seen = [line.split(";") for line in (tmp_path / "seen").read_text().splitlines()]
    assert {int(step) for step, *_ in seen} == set(range(8))
    assert len({omitted for *_, omitted in seen}) == 1
    for step, net, extra, _ in seen:
        assert float(net) == float(extra) == -int(step)


# --- memory ---

RANK = """
import os, sys, time

parent, until = os.getppid(), time.monotonic() + float(sys.argv[1])
from lightning_strategies_ext.elastic.fd_store import FdStoreClient, TorchrunJob

store = FdStoreClient(TorchrunJob.this_process())
stored = os.memfd_create("stored")
store.put("0/memory", stored)
assert [os.path.samestat(os.fstat(fd), os.fstat(stored)) for fd in store.get_all("0/").values()] == [True]
print("is stored", flush=True)
while os.getppid() == parent and time.monotonic() < until:
    time.sleep(0.02)
"""


def stores_below(path: Path) -> list[psutil.Process]:
    """Returns the descriptor stores with this address file, or with an address file below this directory."""
    commands = {process: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
    return [process for process, command in commands.items() if any(str(path) in part for part in command[3:])]


def start_agent(tmp_path: Path, seconds: int) -> "subprocess.Popen[str]":
    """Starts torchrun with a rank that sends memory to a descriptor store and exits after the given time."""
    (tmp_path / "rank.py").write_text(RANK)
    run_id = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --rdzv-id={tmp_path.name}"
    options = f"--nproc-per-node=1 {run_id} --no-python {sys.executable} {tmp_path / 'rank.py'}"
    cache = {user_cache.CACHE_VARIABLE: str(tmp_path / "cache")}
    return start_script("-m", "torch.distributed.run", *options.split(), str(seconds), env=cache)


@pytest.mark.processes
@pytest.mark.parametrize("ending", ["by itself", "by SIGKILL"])
def test_the_descriptor_store_exits_with_the_agent(tmp_path: Path, ending: str):
    cache = tmp_path / "cache"
    agent = start_agent(tmp_path, 1 if ending == "by itself" else 100)
    try:
        assert "is stored\n" in agent.stdout
        assert len(stores_below(cache)) == 1
        if ending == "by SIGKILL":
            agent.kill()
        assert agent.wait() == (0 if ending == "by itself" else -signal.SIGKILL)
    finally:
        kill_tree(agent.pid)
    deadline = time.monotonic() + 30
    while remaining := [*stores_below(cache), *(cache / "fd-stores").iterdir()]:
        assert time.monotonic() < deadline, remaining
        time.sleep(0.1)


REQUEST = r"""
import os, socket, sys
os.setgroups([]), os.setgid(65_500), os.setuid(65_500)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect("\0" + sys.argv[1])
try:
    connection.send(b'{"get_all": ""}')
    print(connection.recv(100))
except OSError:
    print("closed")
"""


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_descriptor_store_rejects_another_user(tmp_path: Path):
    agent = start_agent(tmp_path, 100)
    try:
        assert "is stored\n" in agent.stdout
        (file,) = (tmp_path / "cache" / "fd-stores").iterdir()
        assert file.stat().st_mode & 0o77 == 0
        address = file.read_text()
        assert tmp_path.name not in address
        result = run_command(sys.executable, "-c", REQUEST, address)
        assert result.stdout.split()[-1] in ("b''", "closed"), result.stdout
    finally:
        kill_tree(agent.pid)


PLACEHOLDERS = [
    TensorPlaceholder(0, torch.Size([3, 5]), torch.float32),
    TensorPlaceholder(1, torch.Size([]), torch.int64),
]


def test_an_incomplete_commit_is_detected():
    end = tensor_offsets(PLACEHOLDERS)[1]
    memory = CommitFile.create(end)
    assert memory.batches == -1
    memory.begin_write()
    memory.tensors(PLACEHOLDERS)[0].fill_(2.0)
    memory.finish_write(7, end, b"\x80\x04K\x01.")
    memory.steps_done = 9
    found = CommitFile(os.dup(memory.fd))  # simulates another process
    assert (found.batches, found.steps_done, found.read_state()) == (7, 9, 1)
    assert found.tensors(PLACEHOLDERS)[0].tolist() == [[2.0] * 5] * 3
    memory.begin_write()
    assert found.batches == -1
    for each in (memory, found):
        each.close()


def test_a_commit_that_does_not_fit_is_an_error():
    with pytest.raises(CommitTooLargeError, match=r"A commit has 1048576.0 GiB, and .* are free"):
        CommitFile.create(1 << 50)


def test_a_commit_whose_other_state_does_not_fit_is_an_error(monkeypatch):
    end = tensor_offsets(PLACEHOLDERS)[1]
    memory = CommitFile.create(end)
    memory.begin_write()
    memory.finish_write(7, end, b"\x80\x04K\x01.")

    def fail(*args: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(CommitTooLargeError, match="There is no memory for a commit of 4099 bytes"):
        reserve(memory.fd, 4096, 3)
    assert (memory.batches, memory.read_state()) == (7, 1)
    memory.close()


def test_the_descriptor_store_keeps_a_commit_if_a_new_one_does_not_arrive():
    held = os.memfd_create("held")
    stored = {"0/memory": held}
    rank, store = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with rank, store:
        rank.send(b'{"put": "0/memory"}')  # without its descriptor, as at the limit of open files
        assert not fd_store._handle_request(store, stored)
        assert stored == {"0/memory": held}
        os.fstat(held)
        socket.send_fds(rank, [b'{"put": "0/memory"}'], [held])
        assert fd_store._handle_request(store, stored)
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(held)
    os.close(stored["0/memory"])


# --- arguments ---


def test_without_torchrun_the_error_has_the_command(monkeypatch):
    monkeypatch.delenv(RUN_ID_VARIABLE, raising=False)
    with pytest.raises(StrategyUnavailableError, match=r"torchrun --standalone .*ddp_spawn_elastic_ext"):
        DDPElasticStrategy()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"commit_every_n_steps": 0}, ValueError, "commit_every_n_steps=0"),
        ({"uneven_inputs": "error"}, ValueError, "uneven_inputs='error'"),
        ({"start_method": "fork"}, ValueError, "start_method='fork'"),
        ({"scale_learning_rate": 2}, TypeError, "scale_learning_rate"),
    ],
)
def test_invalid_arguments_are_errors(monkeypatch, arguments, error, message):
    monkeypatch.setattr(TorchrunJob, "this_process", lambda: TorchrunJob("none", os.getpid(), 0.0))
    with pytest.raises(error, match=message):
        DDPElasticStrategy(**arguments)
