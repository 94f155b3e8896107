"""How the ranks of a script are started, and what is not a rank: a process that a rank starts."""

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.horovod_launch import BIN, start_of
from lightning_strategies_ext.launch import rank_variables
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import WITHOUT_MPI, run_command

TRAINER = """
import os, subprocess, sys
from tests.support.models import MLP, loader, make_trainer

def train(strategy):
    trainer = make_trainer(strategy, max_epochs=1, limit_train_batches=1)
    trainer.fit(MLP(), loader())
    return trainer
"""
STARTS_SCRIPT = f"""{TRAINER}
strategy, is_inner = sys.argv[1], len(sys.argv) > 2
trainer = train(strategy)
print(f"{{'inner' if is_inner else 'outer'}} rank {{trainer.global_rank}} of {{trainer.world_size}}", flush=True)
if not is_inner and trainer.is_global_zero:
    subprocess.run([sys.executable, __file__, strategy, "inner"], check=True)
"""
#: Variables of the ranks of a launcher, and what distinguishes them from those of another launch of the same launcher.
LAUNCHED: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "python": ({"LOCAL_RANK": "0", "MASTER_PORT": "1", "WORLD_SIZE": "2"}, {"MASTER_PORT": "2"}),
    "torchrun": (
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"},
        {"MASTER_PORT": "2"},
    ),
    "srun": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}, {"SLURM_STEP_ID": "1"}),
    "horovodrun": (
        {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1"},
        {"HOROVOD_GLOO_RENDEZVOUS_PORT": "2"},
    ),
    "mpirun": ({"OMPI_COMM_WORLD_RANK": "0", "PMIX_NAMESPACE": "a"}, {"PMIX_NAMESPACE": "b"}),
}


def of_another_process(environment: Callable[[str, str], None]) -> None:
    owner, identity = json.loads(os.environ[rank_variables.OWNER])
    environment(rank_variables.OWNER, json.dumps([owner + 1, identity]))


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_a_child_drops_the_variables_of_the_rank_and_neither_the_rank_nor_a_rank_of_another_launch_does(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_rank, of_other_launch = LAUNCHED[launcher]
    for name in [name for name in os.environ if rank_variables.OF_RANKS.fullmatch(name)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(rank_variables.OWNER, "")
    for name, value in {**of_rank, "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    rank_variables.record_owner()
    assert not rank_variables.drop_inherited()  # the rank
    of_another_process(monkeypatch.setenv)
    with monkeypatch.context() as other_launch:
        for name, value in of_other_launch.items():
            other_launch.setenv(name, value)
        other_launch.setenv(rank_variables.OWNER, os.environ[rank_variables.OWNER])
        assert not rank_variables.drop_inherited()
        assert of_rank.keys() <= os.environ.keys()
    assert rank_variables.drop_inherited()
    assert not (of_rank.keys() - {"SLURM_STEP_ID"}) & os.environ.keys()
    assert os.environ["SLURM_JOB_ID"] == "7"  # of the job, for its children too


@pytest.mark.parametrize(("strategy", "error"), [("ddp_ext", RuntimeError), ("ddp_spawn_ext", ValueError)])
def test_where_a_child_cannot_be_recognized_the_error_names_the_variables(
    strategy: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as of_rank:
        of_rank.bind(("127.0.0.1", 0))
        of_rank.listen()
        port = str(of_rank.getsockname()[1])
        for name, value in {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv(rank_variables.OWNER, "")
        monkeypatch.delenv(rank_variables.OWNER)
        with pytest.raises(error, match=f"variables LOCAL_RANK=0, MASTER_ADDR=127.0.0.1, MASTER_PORT={port}.*remove"):
            make_trainer(strategy).fit(MLP(), loader())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("strategy", "launcher"),
    [("ddp_ext", "python"), ("horovod_ext", "python"), ("ddp_ext", "torchrun"), ("horovod_ext", "mpirun")],
)
def test_a_script_that_a_rank_starts_trains_with_ranks_of_its_own(strategy: str, launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STARTS_SCRIPT)
    start = ["torchrun", "--standalone", "--nproc_per_node=2"] if launcher == "torchrun" else None
    command = [*start_of(launcher, 2, str(tmp_path)), sys.executable] if start is None else start
    environment = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **({} if launcher == "mpirun" else WITHOUT_MPI)}
    result = run_command(*command, script, strategy, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    for rank in range(2):
        for who in ("outer", "inner"):
            assert f"{who} rank {rank} of 2" in result.stdout
