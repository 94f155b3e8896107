"""``ddp_ext`` on several hosts: training equals training on one host, and no host waits for a failed host.

One torchrun agent runs on each of two hosts, see :mod:`tests.support.namespace_hosts`. The tests are skipped, with the
reason, on a machine that permits no namespaces.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler

from tests.support import elastic_runs, models
from tests.support.elastic_script import Plan, write_plan
from tests.support.examples import EXAMPLE_ENVIRONMENT
from tests.support.namespace_hosts import Host, NoHostsError, run, two_hosts
from tests.support.ranks import REPOSITORY, kill_tree, run_script

pytestmark = pytest.mark.processes

DIGITS = REPOSITORY / "examples" / "digits.py"

TRAIN_WITHOUT_END = """
import os
import sys
from pathlib import Path

from lightning.pytorch.callbacks import Callback

from lightning_strategies_ext import DDPStrategy
from tests.support import models


class Report(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 5:
            write(f"started{trainer.global_rank}", os.getpid())

    def on_exception(self, trainer, pl_module, exception):
        write(f"ended{trainer.global_rank}", trainer.global_step)


def write(name, number):
    Path(sys.argv[1], name + ".new").write_text(str(number))
    Path(sys.argv[1], name + ".new").rename(Path(sys.argv[1], name))


devices = int(os.environ["LOCAL_WORLD_SIZE"])
models.fit(
    "ddp_ext", devices=devices, num_nodes=2, max_epochs=-1, callbacks=[Report()], default_root_dir=sys.argv[1]
)
"""

HOLD = """
import ctypes

from lightning.pytorch.callbacks import Callback

from tests.support import models


class Hold(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 2 and trainer.global_rank == 1:
            ctypes.PyDLL(None).sleep(12)


models.fit("ddp_ext", devices=1, num_nodes=2, max_epochs=1, callbacks=[Hold()])
"""

EXCHANGE = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support import models

dist.init_process_group("shm")
gloo = dist.new_group(backend="gloo")
rank = dist.get_rank()


def values(dtype, size):
    return (torch.arange(size) * 7 + rank * 3 + 1).remainder(11).to(dtype)


for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
    for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8):
        for size in (1, 1000, 2_500_000):  # the last size is sent in several pieces
            over_shm, over_gloo = values(dtype, size), values(dtype, size)
            work = dist.all_reduce(over_shm, op, async_op=True)
            dist.all_reduce(over_gloo, op, group=gloo)
            work.wait()
            assert torch.equal(over_shm, over_gloo), (op, dtype, size)
mean = torch.full((3,), float(rank))
dist.all_reduce(mean, dist.ReduceOp.AVG)
assert mean.tolist() == [1.5] * 3
strided = torch.full((4, 6), float(rank)).t()
dist.all_reduce(strided)
assert (strided == 6.0).all()
for source in range(4):
    tensor = values(torch.float32, 100_000) if rank == source else torch.empty(100_000)
    dist.broadcast(tensor, source)
    assert torch.equal(tensor, (torch.arange(100_000) * 7 + source * 3 + 1).remainder(11).float())
gathered = [torch.empty(5) for _ in range(4)]
dist.all_gather(gathered, torch.full((5,), float(rank)))
assert [part[0].item() for part in gathered] == [0.0, 1.0, 2.0, 3.0]
part = torch.empty(2)
dist.reduce_scatter_tensor(part, torch.arange(8.0))
assert part.tolist() == [8.0 * rank, 8.0 * rank + 4]
objects = [None] * 4
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": other} for other in range(4)]
dist.barrier()
counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
before = int(counter.read_text())
dist.all_reduce(torch.ones(2**20))
dist.barrier()
Path(sys.argv[1], f"sent{rank}").write_text(str(int(counter.read_text()) - before))
dist.destroy_process_group()

_, model = models.fit("ddp_ext", devices=2, num_nodes=2)
assert dist.get_backend() == "shm"
torch.save(models.state_of(model), Path(sys.argv[1], f"weights{rank}"))
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Provides two hosts that reach each other."""
    with ExitStack() as stack:
        try:
            yield stack.enter_context(two_hosts(tmp_path_factory.mktemp("hosts")))
        except NoHostsError as error:
            pytest.skip(str(error))


#: Each job has a new port, because remaining processes of the previous job may hold its port for a moment.
_ports = count(29500)


class Job:
    """One torchrun agent on each host.

    Args:
        ranks: Number of ranks on each host.
        rendezvous: "static" if arguments assign the agents' ranks, or "c10d" if the agents determine them.
        directory: Directory of the outputs.
        **env: Further environment variables.
    """

    def __init__(
        self, hosts: list[Host], ranks: int, rendezvous: str, directory: Path, *script: str | Path, **env: str
    ) -> None:
        self.hosts = hosts
        self.logs = [directory / f"host{index}.log" for index in range(len(hosts))]
        self.agents = []
        port = next(_ports)
        for index, (host, log) in enumerate(zip(hosts, self.logs, strict=True)):
            where = {
                "static": f"--node-rank {index} --master-addr {hosts[0].name} --master-port {port}",
                "c10d": f"--rdzv-backend c10d --rdzv-id job --rdzv-endpoint {hosts[0].name}:{port}",
            }[rendezvous].split()
            torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks), *where]
            self.agents.append(host.start(*torchrun, *script, log=log, **env))

    def exit_codes(self, timeout_s: float) -> list[int]:
        """Waits for both agents; fails with their outputs if an agent does not exit."""
        deadline = time.monotonic() + timeout_s
        try:
            return [agent.wait(max(0.0, deadline - time.monotonic())) for agent in self.agents]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output()}") from None

    def output(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in self.logs)

    def stop(self) -> None:
        for agent in self.agents:
            kill_tree(agent.pid)
            agent.wait()


StartJob = Callable[..., Job]


@pytest.fixture
def start_job(hosts: list[Host], tmp_path: Path) -> Iterator[StartJob]:
    """Starts a script on both hosts, and kills its remaining processes after the test."""
    jobs = []

    def start(*script: str | Path, rendezvous: str = "static", ranks: int = 1, **env: str) -> Job:
        jobs.append(Job(hosts, ranks, rendezvous, tmp_path, *script, **env))
        return jobs[-1]

    yield start
    for job in jobs:
        job.stop()


def numbers_in(files: list[Path], job: Job, timeout_s: float = 60) -> list[int]:
    """Waits until the ranks have written a number into each file."""
    deadline = time.monotonic() + timeout_s
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, job.output()
        assert any(agent.poll() is None for agent in job.agents) or all(file.exists() for file in files), job.output()
        time.sleep(0.02)
    return [int(file.read_text()) for file in files]


def test_two_hosts_train_what_two_processes_on_one_host_train(start_job: StartJob, tmp_path: Path):
    epochs = ("--epochs", "3")
    job = start_job(
        DIGITS, "--num-nodes", "2", "--devices", "1", *epochs, "--dir", tmp_path / "two", **EXAMPLE_ENVIRONMENT
    )
    assert job.exit_codes(timeout_s=300) == [0, 0], job.output()
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in job.output().splitlines() if "│" in line]
    values = dict(table)
    assert len(values) == len(table), "the table must be printed once"
    assert values["processes"] == "2"
    assert float(values["accuracy on 360 held-out images"]) > 0.9

    assert run_script(DIGITS, *epochs, "--dir", tmp_path / "one", env=EXAMPLE_ENVIRONMENT).returncode == 0
    two, one = (torch.load(tmp_path / name / "digits.ckpt", weights_only=True) for name in ("two", "one"))
    assert two["global_step"] == one["global_step"] > 0
    models.assert_same_bits(two["state_dict"], one["state_dict"])


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_killed_on_one_host_ends_the_other_host(start_job: StartJob, tmp_path: Path, killed: int):
    script = tmp_path / "train.py"
    script.write_text(TRAIN_WITHOUT_END)
    job = start_job(script, tmp_path)
    pids = numbers_in([tmp_path / f"started{rank}" for rank in range(2)], job)
    kill_tree(pids[killed])
    exit_codes = job.exit_codes(timeout_s=120)
    assert all(code != 0 for code in exit_codes), job.output()


def test_the_ranks_of_both_hosts_exit_after_a_loss_of_the_network(
    start_job: StartJob, tmp_path: Path, hosts: list[Host]
):
    script = tmp_path / "train.py"
    script.write_text(TRAIN_WITHOUT_END)
    job = start_job(script, tmp_path, ranks=2)
    numbers_in([tmp_path / f"started{rank}" for rank in range(4)], job)
    hosts[0].set_cable("down")
    try:
        numbers_in([tmp_path / f"ended{rank}" for rank in range(4)], job, timeout_s=300)
    finally:
        hosts[0].set_cable("up")
    deadline = time.monotonic() + 120
    for this, other in ((0, 1), (1, 0)):
        while f"on {hosts[other].name} are lost" not in job.logs[this].read_text():  # logged when all ranks have exited
            assert time.monotonic() < deadline, job.output()
            time.sleep(0.1)


def test_a_rank_in_which_a_library_holds_the_interpreter_for_a_while_is_not_lost(start_job: StartJob, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(HOLD)
    job = start_job(script)
    assert job.exit_codes(timeout_s=300) == [0, 0], job.output()


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_suspended_rank_that_is_alone_on_its_host_is_hung(start_job: StartJob, tmp_path: Path, stopped: int):
    script = tmp_path / "train.py"
    script.write_text(TRAIN_WITHOUT_END.replace('"ddp_ext"', "DDPStrategy(hang_timeout=3)"))
    job = start_job(script, tmp_path)
    pids = numbers_in([tmp_path / f"started{rank}" for rank in range(2)], job)
    os.kill(pids[stopped], signal.SIGSTOP)
    numbers_in([tmp_path / f"ended{1 - stopped}"], job, timeout_s=300)
    assert job.agents[1 - stopped].wait(120) != 0
    output = job.logs[1 - stopped].read_text()
    assert f"rank {stopped} on {job.hosts[stopped].name} is stuck" in output, output
    assert f"rank {stopped} sends no heartbeats: the process is stopped, or" in output, output


def test_a_rank_that_is_killed_is_named_on_the_other_host(start_job: StartJob, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN_WITHOUT_END)
    job = start_job(script, tmp_path, ranks=2)
    pids = numbers_in([tmp_path / f"started{rank}" for rank in range(4)], job)
    os.kill(pids[3], signal.SIGKILL)
    assert all(code != 0 for code in job.exit_codes(timeout_s=300)), job.output()
    for rank in range(3):  # usually an exception; sometimes gloo does not return, and the monitor terminates the rank
        terminated_text = f"rank {rank} was terminated because rank 3 failed"
        assert (tmp_path / f"ended{rank}").exists() or terminated_text in job.output(), job.output()
    assert f"rank 3 on {job.hosts[1].name} failed first" in job.logs[0].read_text(), job.output()


def test_a_sigterm_on_one_host_ends_both_before_the_same_step(start_job: StartJob, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN_WITHOUT_END)
    job = start_job(script, tmp_path, rendezvous="c10d")
    pids = numbers_in([tmp_path / f"started{rank}" for rank in range(2)], job)
    run("kill", "-TERM", str(pids[1]))
    assert job.exit_codes(timeout_s=120) == [0, 0], job.output()
    steps = numbers_in([tmp_path / f"ended{rank}" for rank in range(2)], job)
    assert steps[0] == steps[1] > 5


def test_ranks_reduce_inside_each_host_before_they_send_to_other_hosts(start_job: StartJob, tmp_path: Path):
    script = tmp_path / "exchange.py"
    script.write_text(EXCHANGE)
    job = start_job(script, tmp_path, ranks=2)
    assert job.exit_codes(timeout_s=300) == [0, 0], job.output()
    # One rank of each host sends 4 MiB. Gloo's ring of four ranks would send 6 MiB over the network.
    assert all(2**22 < sent < 1.2 * 2**22 for sent in numbers_in([tmp_path / f"sent{rank}" for rank in range(4)], job))
    # Training over shm, the default, equals training in one process.
    torch.manual_seed(11)
    model = models.MLP()
    order = DistributedSampler(models.dataset(), num_replicas=1, rank=0, seed=11)
    models.make_trainer("auto", devices=1).fit(model, models.loader(batch_size=16, sampler=order))
    ranks = [torch.load(tmp_path / f"weights{rank}", weights_only=True) for rank in range(4)]
    for weights in ranks:
        models.assert_same_bits(weights, ranks[0])
        torch.testing.assert_close(weights, models.state_of(model))


@pytest.mark.timeout(900)
def test_training_continues_after_an_elastic_host_leaves_and_joins(hosts: list[Host], tmp_path: Path):
    directory = tmp_path / "run"
    directory.mkdir()
    plan = Plan(1, "torchrun", strategy=elastic_runs.STRATEGY, pause_s=0.2)  # pauses while a rank is alone
    write_plan(directory, plan)
    rendezvous = (
        f"--rdzv-backend=c10d --rdzv-id=job --rdzv-endpoint={hosts[0].name}:29400 --rdzv-conf=last_call_timeout=3"
    )
    torchrun = f"-m torch.distributed.run --nnodes=1:2 --nproc-per-node=1 --max-restarts=3 {rendezvous} -m".split()
    script = "tests.support.elastic_script", directory
    # Without it, torch 2.13's agents cannot add a host, see docs/ddp_elastic.md.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    logs = [tmp_path / f"host{index}.log" for index in range(3)]

    def worlds(number: int) -> list[tuple[int, int]]:
        deadline = time.monotonic() + 90
        while len(found := elastic_runs.read_run(directory, "", 0).worlds) < number:
            assert time.monotonic() < deadline, "\n".join(log.read_text() for log in logs if log.exists())
            time.sleep(0.2)
        return found

    try:
        agents = [host.start(*torchrun, *script, log=log, **env) for host, log in zip(hosts, logs[:2], strict=True)]
        worlds(1)
        hosts[1].kill_all()
        worlds(2)
        agents.append(hosts[1].start(*torchrun, *script, log=logs[2], **env))
        worlds(3)
        code = agents[0].wait(90)
    finally:
        for host in hosts:
            host.kill_all()
    run = elastic_runs.read_run(directory, logs[0].read_text(), code)
    elastic_runs.check_is_as_accurate_as_uninterrupted(run)
    assert [size for size, _ in run.worlds] == [2, 1, 2]
    # The ranks that continue have committed before the third step.
    assert re.search(r"with 2 ranks \(1 new\) from the commit at step \d+; 0 steps are repeated", run.output), run
