"""The promises of the ``shm`` process group in a storm: threads, callbacks, subgroups, destroyed groups, at random."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_strategies_ext.shm.native_build import VARIABLE
from tests.support.shm_programs import GLOO_IS_WHOLE, INLINE_NUM_BYTES, LAYOUTS, SLOT_NUM_BYTES, Operation
from tests.support.shm_storms import HOWS, NUM_THREADS, SHORT_LIVED, Move, StormPool

#: ``SHM_STORMS=100`` makes this many times as many, for a night.
FACTOR = int(os.environ.get("SHM_STORMS", "1"))
NUM_EXAMPLES = {2: 6, 3: 5}
KINDS = ["all_reduce", "all_reduce", "broadcast", "all_gather", "reduce", "barrier"]
KINDS += ["reduce_scatter_tensor"] if GLOO_IS_WHOLE else []


@st.composite
def moves(draw: st.DrawFn) -> Move:
    waits = draw(st.sampled_from(["sync", "async", "async", "async"]))
    group = draw(st.integers(0, SHORT_LIVED))
    destroys = draw(st.integers(0, 7)) == 0
    operation = Operation(
        kind=draw(st.sampled_from(KINDS)),
        group=group,
        dtype=draw(st.sampled_from(["float32", "int64", "bfloat16"])),
        op=draw(st.sampled_from(["SUM", "SUM", "MAX"])),
        num_bytes=draw(st.sampled_from([8, 4000, INLINE_NUM_BYTES, SLOT_NUM_BYTES, 20 * SLOT_NUM_BYTES])),
        extra=draw(st.integers(0, 1)),
        root=draw(st.integers(0, 2)),
        layout=draw(st.sampled_from(LAYOUTS)),
        waits=waits,
        seed=draw(st.integers(0, 1000)),
    )
    return Move(
        operation,
        starter=draw(st.sampled_from([None, *range(NUM_THREADS)])),
        waiter=draw(st.integers(0, NUM_THREADS - 1)),
        how=draw(st.sampled_from(HOWS)),
        destroys=destroys,
    )


STORMS = st.lists(st.lists(moves(), min_size=3, max_size=12), min_size=2, max_size=5)


@pytest.fixture(params=["compiled", "in rounds"])
def way(request: pytest.FixtureRequest) -> str:
    """How all-reduces are carried out; all else goes in rounds."""
    return str(request.param)


@pytest.fixture
def pool(way: str, request: pytest.FixtureRequest) -> Iterator[StormPool]:
    pool = StormPool(request.getfixturevalue("world_size"), {VARIABLE: "1" if way == "compiled" else "0"})
    yield pool
    pool.stop()


@pytest.mark.timeout(200 + 100 * FACTOR)
@pytest.mark.parametrize("world_size", NUM_EXAMPLES)
def test_a_storm_ends_with_the_results_of_gloo_on_every_rank(pool: StormPool, world_size: int):
    @settings(
        max_examples=FACTOR * NUM_EXAMPLES[world_size],
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(STORMS)
    def check(storms: list[list[Move]]) -> None:
        wrong = pool.run(storms)
        assert not wrong, wrong

    check()
