"""Loss of ranks on GPUs in elastic training: workers of ``fit``, and ranks that torchrun restarts.

Each run trains on digits for as many epochs as an uninterrupted run, counts every sample, and must be as accurate.
"""

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rank_launcher import free_port
from tests.gpu.devices import ON_CPU, Ranks
from tests.support import elastic_runs
from tests.support.elastic_runs import STRATEGY, UNTIL_IT_JOINS, check_is_as_accurate_as_uninterrupted, run_workers
from tests.support.elastic_script import Plan, joins_later, kill, once, sleep, write_plan
from tests.support.ranks import kill_tree, start_script

pytestmark = pytest.mark.processes

SHARED = {"is_on_one_gpu": not ON_CPU}


@pytest.mark.parametrize(
    ("action", "where", "begins_at"),
    [
        (kill, {"rank": 0, "step": 70}, 60),
        (kill, {"rank": 1, "step": 70}, 60),
        (kill, {"rank": 1, "step": 60, "during": "commit"}, 40),
        (kill, {"rank": 0, "step": 50, "during": "validation"}, 80),
        (sleep, {"rank": 1, "step": 70}, 60),
    ],
    ids=["kill rank 0", "kill rank 1", "kill in commit", "kill in validation", "sleep"],
)
def test_a_lost_worker_is_restarted_on_its_gpu(action: Any, where: dict[str, Any], begins_at: int, two_ranks: Ranks):
    strategy = {**STRATEGY, "hang_timeout": 4}
    run = run_workers(2, once(action, **where), joins_later, strategy=strategy, **UNTIL_IT_JOINS, **SHARED)
    print(run.output)
    check_is_as_accurate_as_uninterrupted(run)
    assert [size for size, _ in run.worlds] == [2, 1, 2]
    assert run.worlds[1] == (1, begins_at)
    assert f"restarting worker {where['rank']} (" in run.output
    assert len({line["pid"] for line in run.having("samples")}) == 3  # the other rank is still the same process


def test_ranks_that_torchrun_restarts_continue_from_the_memory_of_their_hosts(two_ranks: Ranks, tmp_path: Path):
    kills = once(kill, rank=1, step=70), once(kill, rank=0, step=100, during="validation")
    plan = Plan(2, "torchrun", faults=kills, strategy=STRATEGY, trainer={"num_nodes": 2}, **SHARED)
    rendezvous = f"--rdzv-backend=c10d --rdzv-id={tmp_path.name} --rdzv-endpoint=127.0.0.1:{free_port()}"
    torchrun = "-m torch.distributed.run --nnodes=2 --nproc-per-node=1 --max-restarts=3 --monitor-interval=0.1"
    with tempfile.TemporaryDirectory() as directory:
        write_plan(Path(directory), plan)
        script = sys.executable, "-m", "tests.support.elastic_script", directory
        command = [*torchrun.split(), *rendezvous.split(), "--no-python", *script]
        agents = [start_script(*command) for _ in range(2)]
        try:
            with ThreadPoolExecutor() as pool:
                outputs = list(pool.map(lambda agent: agent.communicate(timeout=300)[0], agents))
        finally:
            for agent in agents:
                kill_tree(agent.pid)
        code = max(agent.returncode for agent in agents)
        run = elastic_runs.read_run(Path(directory), "".join(outputs), code)
    print(run.output)
    check_is_as_accurate_as_uninterrupted(run)
    assert run.worlds == [(2, 0), (2, 60), (2, 120)]
    assert "with 2 ranks (0 new) from the commit at step 60; 10 steps are repeated" in run.output
