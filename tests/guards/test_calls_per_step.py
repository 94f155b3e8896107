"""A training step of each strategy calls as many functions of this package as recorded.

See :mod:`tests.guards.calls_per_step` for the record and for the command that rewrites it.
"""

import pytest

from lightning_strategies_ext.horovod_build.installed import horovod_problem
from lightning_strategies_ext.registry import STRATEGIES
from tests.guards import calls_per_step
from tests.guards.steps import CASES, CONTENDERS, Contender
from tests.guards.versions import skip_unless_recorded

#: Registered name → why its steps are not counted.
NOT_COUNTED = {
    "ddp_notebook_ext": "has the class and the start method of ddp_fork_ext",
    "ddp_ray_ext": "has the step of ddp_spawn_ext, and starting Ray takes longer than all other trainings together",
    "ddp_ray_elastic_ext": "has the step of ddp_spawn_elastic_ext; see ddp_ray_ext",
    "horovod_elastic_ext": "needs horovodrun with a discovery script; has the step of horovod_ext in an elastic fit",
    "dp": "is another name of dp_ext",
    "horovod": "is another name of horovod_ext",
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_a_step_calls_as_many_functions_of_this_package_as_recorded(contender: Contender, case: str) -> None:
    skip_unless_recorded(calls_per_step.read()["versions"], calls_per_step.versions())
    if contender.start == "horovod" and (problem := horovod_problem()):
        pytest.skip(f"Horovod does not work here: {problem}")
    calls = calls_per_step.measure(contender.start)[contender.name, case]
    print(f"{contender.name}, {case}: {calls}")
    difference = calls_per_step.explain(contender.name, case, calls)
    assert not difference, difference


