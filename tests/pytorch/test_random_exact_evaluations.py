"""Random evaluations with ``exact_evaluation=True``: every sample counts once, and no rank waits indefinitely.

``EXACT_EVALUATIONS=20`` multiplies the number of evaluations, and draws different ones in each call.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.exact_evaluations import (
    CALLS,
    EPOCH_HOOKS,
    KINDS,
    METRICS,
    STEP_HOOKS,
    Case,
    Samples,
    evaluate,
)
from tests.support.exact_results import evaluations_of, values_of
from tests.support.rank_pool import RankPool

FACTOR = int(os.environ.get("EXACT_EVALUATIONS", "1"))
NUM_EXAMPLES = {2: 60, 3: 50, 4: 40}
#: Time limit of an evaluation in seconds, which only a hang reaches: most evaluations take a tenth of a second.
LIMIT_S = 90.0
LENGTHS = st.one_of(st.integers(0, 3), st.integers(0, 20))


@st.composite
def samples(draw: st.DrawFn, world_size: int) -> Samples:
    kind = draw(st.sampled_from(KINDS))
    size = 1 if kind == "shards" else world_size
    lengths = draw(st.lists(LENGTHS, min_size=size, max_size=size))
    return Samples(kind, tuple(lengths), draw(st.integers(1, 7)), draw(st.booleans()))


@st.composite
def cases(draw: st.DrawFn, world_size: int) -> Case:
    hooks = st.sampled_from([*STEP_HOOKS, *EPOCH_HOOKS])
    return Case(
        world_size,
        backend=draw(st.sampled_from(["shm", "gloo"])),
        stage=draw(st.sampled_from(["validate", "test", "fit"])),
        loaders=tuple(draw(st.lists(samples(world_size), min_size=1, max_size=3))),
        limit=draw(st.sampled_from([1.0, 1.0, 1, 2, 3])),
        num_sanity_steps=draw(st.sampled_from([0, 2])),
        calls=tuple(draw(st.lists(st.tuples(hooks, st.sampled_from(CALLS)), max_size=5, unique=True))),
        metrics=tuple(draw(st.lists(st.sampled_from([*METRICS]), unique=True))),
        has_buffers=draw(st.booleans()),
        changes_batches=draw(st.booleans()),
        logs_steps=draw(st.booleans()),
    )


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    pools = {world_size: RankPool(world_size) for world_size in NUM_EXAMPLES}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.mark.processes
@pytest.mark.timeout(900 * FACTOR)
@pytest.mark.parametrize("world_size", NUM_EXAMPLES)
def test_every_sample_counts_once_on_any_number_of_ranks(world_size: int, pools: dict[int, RankPool]) -> None:
    @settings(
        max_examples=FACTOR * NUM_EXAMPLES[world_size],
        deadline=None,
        derandomize=FACTOR == 1,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(world_size))
    def check(case: Case) -> None:
        assert_exact(case, pools[world_size])

    check()


def case_of(kind: str, *lengths: int, **options: Any) -> Case:
    """Returns a case with one DataLoader whose ranks have the given numbers of samples."""
    return Case(len(lengths), "shm", "validate", (Samples(kind, lengths, 1),), **options)


#: Evaluations that were wrong in an earlier version.
CORRECTED = {
    "an empty stream with a length": case_of("sized stream", 0, 1),
    "a limit of batches without a length": case_of("batches", 0, 1, limit=1),
    "a metric computed in a shadowed step": case_of(
        "stream", 1, 3, metrics=("mean", "cat"), calls=(("batch_end", "compute"),)
    ),
    "a metric computed on a rank without samples": case_of(
        "stream", 0, 3, metrics=("mean", "cat"), calls=(("batch_end", "compute"),)
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", CORRECTED)
def test_evaluations_that_were_wrong_are_exact(name: str, pools: dict[int, RankPool]) -> None:
    assert_exact(CORRECTED[name], pools[CORRECTED[name].world_size])


def assert_exact(case: Case, pool: RankPool) -> None:
    """Runs a case, and compares samples and results with those of :mod:`~tests.support.exact_results`."""
    outcomes = pool.run(evaluate, case, limit_s=LIMIT_S)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"{case}\nrank {rank}: {outcome.error}\n{outcome.trace}"
    ranks: list[dict[str, Any]] = [outcome.value for outcome in outcomes]
    for rank, found in enumerate(ranks):
        assert found["values"] == pytest.approx(values_of(case), rel=1e-5), f"logged values of rank {rank}"
        expected = evaluations_of(case, rank)
        assert len(found["evaluations"]) == len(expected), f"number of evaluations of rank {rank}"
        for own, other in zip(found["evaluations"], expected, strict=True):
            results = {name: result for name, result in own["results"].items() if result}
            assert results == {name: pytest.approx(result) for name, result in other.pop("results").items() if result}
            assert {name: own[name] for name in other} == other, f"rank {rank}"
            assert [sample for is_shadowed, step in own["steps"] if not is_shadowed for sample in step] == own["seen"]
    for evaluations in zip(*[found["evaluations"] for found in ranks], strict=True):
        steps = [each["steps"] for each in evaluations]
        assert len({*map(len, steps)}) == 1, "ranks run different numbers of steps"
        if case.stage == "fit" and steps[0]:  # DDP broadcasts rank 0's buffers in the first step
            of_rank_0 = evaluations[0]["buffer"][0]
            assert [each["buffer"][1] for each in evaluations] == [of_rank_0] * case.world_size
