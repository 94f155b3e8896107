"""A training step of each strategy calls as many functions of this package as recorded.

See :mod:`tests.guards.calls_per_step` for the record and for the command that rewrites it.
"""

import re
import threading
from pathlib import Path
from typing import Any

import pytest

import lightning_strategies_ext
from lightning_strategies_ext.horovod_build.installed import horovod_problem
from lightning_strategies_ext.pytorch.parallel import ParallelStrategy
from lightning_strategies_ext.registry import COMPRESSIONS, STRATEGIES
from tests.guards import calls_per_step, steps
from tests.guards.profiler import MONITOR_THREADS, Profiler
from tests.guards.steps import CASES, CONTENDERS, Contender
from tests.guards.versions import skip_unless_recorded
from tests.support.ranks import run_ranks

#: Registered name → why its steps are not counted.
NOT_COUNTED = {
    "ddp_ext_fp16": "differs from ddp_ext_bf16 in a dtype",
    "ddp_notebook_ext": "has the class and the start method of ddp_fork_ext",
    "ddp_ray_ext": "has the step of ddp_spawn_ext; Ray takes longer to start than all other programs together",
    "ddp_ray_elastic_ext": "has the step of ddp_spawn_elastic_ext; see ddp_ray_ext",
    "horovod_elastic_ext": "needs horovodrun with a discovery script; its step is that of horovod_ext",
    "dp": "is another name of dp_ext",
    "horovod": "is another name of horovod_ext",
}
VARIANT = re.compile(rf"(.*?)_(find_unused_parameters_(?:true|false)|{'|'.join(COMPRESSIONS)})")


@pytest.mark.processes
@pytest.mark.timeout(900)  # the first test of a start trains with all strategies of the start
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


def test_each_registered_name_is_counted_or_there_is_a_reason() -> None:
    """A variant is covered if its base and the same variant of ``ddp_ext`` are counted. ``_false`` is the default."""
    counted = {contender.name.split(", ")[0] for contender in CONTENDERS} | NOT_COUNTED.keys()
    missing = set()
    for name in (row.name for row in STRATEGIES):
        variant = VARIANT.fullmatch(name)
        needed = {variant[1], f"ddp_ext_{variant[2]}".replace("_false", "_true")} if variant else {name}
        missing |= needed - counted
    assert not missing


# --- what the guard detects ---


def functions_in_a_file_of_this_package() -> dict[str, Any]:
    file = Path(lightning_strategies_ext.__file__).with_name("added.py")
    namespace: dict[str, Any] = {}
    exec(compile("def called(): pass\ndef generate():\n    yield from (1, 2)", file, "exec"), namespace)
    return namespace


def train_with_one_call_more(directory: str) -> None:
    called = functions_in_a_file_of_this_package()["called"]
    training_step = ParallelStrategy.training_step

    def with_one_call_more(self: Any, *args: Any, **kwargs: Any) -> Any:
        called()
        return training_step(self, *args, **kwargs)

    ParallelStrategy.training_step = with_one_call_more  # type: ignore[method-assign]
    steps.train(CONTENDERS[0], "plain", directory)


@pytest.mark.processes
def test_one_call_more_in_a_step_is_a_difference(tmp_path: Path) -> None:
    skip_unless_recorded(calls_per_step.read()["versions"], calls_per_step.versions())
    run_ranks(train_with_one_call_more, str(tmp_path))
    name = CONTENDERS[0].name
    calls = calls_per_step.of_all_ranks(name, "plain", sorted(tmp_path.glob("*.json")))
    recorded = calls_per_step.read()["calls"][name]["plain"]
    difference = calls_per_step.explain(name, "plain", calls)
    assert f"calls {recorded + 1} functions of this package; recorded are {recorded}.\n" in difference
    assert "\n  +1 added:called\n" in difference


def count_calls() -> tuple[list[dict[str, int]], str]:
    functions = functions_in_a_file_of_this_package()
    profiler = Profiler()
    profiler.install()
    profiler.begin()
    functions["called"]()
    list(functions["generate"]())
    profiler.begin_next()
    for name in ("any", *MONITOR_THREADS):
        thread = threading.Thread(target=functions["called"], name=name)
        thread.start()
        thread.join()
    counts = [dict(window.functions) for window in profiler.end()]
    release = threading.Event()
    threading.setprofile(None)
    thread = threading.Thread(target=release.wait, name="early")
    thread.start()
    with pytest.raises(AssertionError) as raised:
        profiler.begin()
    release.set()
    thread.join()
    return counts, str(raised.value)


@pytest.mark.processes
def test_calls_are_counted_on_all_threads_except_monitors_or_reported_as_uncounted() -> None:
    [(counts, message)] = run_ranks(count_calls, world_size=1)
    assert counts == [{"added:called": 1, "added:generate": 3}, {"added:called": 1}]
    assert message == "The calls on these threads are not counted: ['early']."
