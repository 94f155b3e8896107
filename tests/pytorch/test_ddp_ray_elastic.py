"""Loss of workers with ``ddp_ray_elastic_ext``: the other workers continue, and Ray starts a replacement.

:mod:`tests.elastic` tests the behavior of elastic training that does not depend on the launcher.
"""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_strategies_ext import DDPRayElasticStrategy, DDPRayStrategy
from tests.support.elastic_runs import STRATEGY, Run, check_is_as_accurate_as_uninterrupted, run_plan
from tests.support.elastic_script import Fault, Net, Plan, kill, once
from tests.support.models import MLP, loader, make_trainer
from tests.support.namespace_hosts import ADDRESSES, NoHostsError, unplug
from tests.support.ray_clusters import FOREVER_S, HALF, PROGRAM_S, needs_ray, ray_on_two_hosts, variables_of_own_ray

pytestmark = [pytest.mark.processes, needs_ray, pytest.mark.timeout(FOREVER_S)]


@pytest.fixture(scope="module", autouse=True)
def variables() -> Iterator[dict[str, str]]:
    with variables_of_own_ray() as found:
        yield found


def run(variables: dict[str, str], strategy: dict[str, Any], *faults: Fault, **plan: Any) -> Run:
    whole = Plan(2, "ray", faults, {**HALF, **STRATEGY, **strategy}, **plan)
    return run_plan(whole, env=variables, timeout_s=PROGRAM_S)


def kill_one_after_the_other(net: Net, at: str) -> None:
    """Kills rank 1, then rank 0, once each; the remaining rank waits for each replacement."""
    if at == "setup" and net.is_replacement:
        net.wait_until(net.has_been_smaller)
        net.first(f"replacement {net.number}")
    if at != "train":
        return
    if net.global_rank == 1 and net.trainer.global_step >= 70 and net.first("first kill"):
        kill(net)
    if net.size == 1:
        number = 3 if net.has_happened("second kill") else 2
        net.wait_until(lambda: net.has_happened(f"replacement {number}"))
        if net.first("sleep"):
            time.sleep(7)  # the replacement waits for this rank
    is_due = net.global_rank == 0 and net.size == 2 and net.num_batches >= 10
    if is_due and net.has_happened("sleep") and net.first("second kill"):
        kill(net)


def test_workers_that_are_killed_are_replaced_and_the_other_keeps_its_process(variables):
    found = run(variables, {}, kill_one_after_the_other, pause_s=0.02, pauses_in=[1])
    check_is_as_accurate_as_uninterrupted(found)
    assert [size for size, _ in found.worlds] == [2, 1, 2, 1, 2]
    assert found.worlds[1] == (1, 60)
    assert "with 1 ranks (0 new) from the commit at step 60; 10 steps are repeated" in found.output
    assert "with 2 ranks (1 new)" in found.output
    assert "restarting worker 1 (not started by Ray so far)" in found.output
    assert "restarting worker 0 (" in found.output
    assert len({line["pid"] for line in found.having("samples")}) == 4


def test_a_restart_beyond_max_restarts_ends_fit_with_the_cause(variables):
    found = run(variables, {"max_restarts": 0}, once(kill, rank=1, step=30))
    assert found.code != 0
    assert "restarting worker" not in found.output
    assert "WorkerDiedError: rank 1 (pid" in found.output
    assert "`max_restarts=0` within 600 s (`restart_window`) is reached" in found.output


def test_after_a_host_loss_the_worker_is_restarted_on_another_host(tmp_path):
    health_check = {"period_ms": "1000", "timeout_ms": "3000", "failure_threshold": "3", "initial_delay_ms": "1000"}
    settings = {f"RAY_health_check_{name}": value for name, value in health_check.items()}
    strategy = {**HALF, **STRATEGY, "placement_strategy": "SPREAD", "min_workers": 2, "address": "auto"}
    plan = Plan(2, "ray", [once(unplug, rank=1, step=70)], strategy)
    try:
        with ray_on_two_hosts(tmp_path, (1, 1), **settings) as (hosts, variables, _):
            found = run_plan(plan, *hosts[0].enter(), env=variables, timeout_s=PROGRAM_S)
    except NoHostsError as error:
        pytest.skip(str(error))
    check_is_as_accurate_as_uninterrupted(found)
    assert found.worlds == [(2, 0), (2, 60)]
    assert f"on {ADDRESSES[1]}) exited in the middle of its work. Ray reports: the actor's node was" in found.output


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"min_workers": 0}, ValueError, "min_workers=0"),
        ({"max_restarts": 1.5}, TypeError, "max_restarts"),
        ({"uneven_inputs": "error"}, ValueError, "uneven_inputs='error'"),
        ({"num_workers": 0}, ValueError, "num_workers=0"),
        ({"start_method": "fork"}, ValueError, "Ray starts"),
        ({"address": "ray://head:10001"}, ValueError, "Ray Client"),
        ({"elastic": False}, TypeError, "elastic=False"),
    ],
)
def test_invalid_arguments_are_refused_at_construction(arguments, error, message):
    with pytest.raises(error, match=message):
        DDPRayElasticStrategy(**arguments)


def test_the_argument_elastic_gives_the_class_and_min_workers_cannot_exceed_workers():
    strategy = DDPRayStrategy(2, elastic=True, min_workers=3, max_restarts=0)
    assert type(strategy) is DDPRayElasticStrategy
    with pytest.raises(ValueError, match=r"`min_workers=3`: there are at most 2 workers"):
        make_trainer(strategy, devices=1).fit(MLP(), loader())
