"""Runs fifty fixed seeds of the fuzzer with all strategies, and checks that the fuzzer detects injected faults.

A failure shows the case and its differences. `python -m tests.fuzz --strategy STRATEGY --seed SEED` runs it again, and
shrinks it.
"""

from collections.abc import Iterator

import pytest

from tests.fuzz.cases import Case, draw, possible, simplifications
from tests.fuzz.checking import Pools, check
from tests.fuzz.shrinking import shrink

#: Number of seeds of each strategy. The cases of a strategy run one after the other, in the same ranks.
NUM_SEEDS = {"ddp_ext": 14, "horovod_ext": 12, "dp_ext": 12, "ddp_spawn_ext": 9, "ddp_fork_ext": 3}


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with Pools() as pools:
        yield pools


@pytest.mark.processes
@pytest.mark.parametrize(
    ("strategy", "seed"), [(strategy, seed) for strategy, number in NUM_SEEDS.items() for seed in range(number)]
)
def test_case(pools: Pools, strategy: str, seed: int) -> None:
    result = check(draw(strategy, seed), pools)
    assert result.kind != "wrong", f"{result}\nShrink: python -m tests.fuzz --strategy {strategy} --seed {seed}"


FAULTS = {
    "gradient": "a gradient that one rank does not exchange",
    "hook": "a hook that is not called",
    "sample": "a sample in place of another one",
}


@pytest.mark.processes
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_its_case_shrunk(pools: Pools, fault: str) -> None:
    case = Case("ddp_ext", 0, blocks=("linear", "dropout"), optimizer="adam", num_samples=16, fault=fault)
    result = check(case, pools)
    assert result.kind == "wrong", FAULTS[fault]
    assert any({"gradient": "model", "hook": "hooks", "sample": "samples"}[fault] in one for one in result.differences)
    smallest = shrink(result, pools).case
    assert (smallest.blocks, smallest.optimizer, smallest.num_samples) == ((), "sgd", 24)


def test_a_case_is_that_of_its_seed() -> None:
    cases = [draw(strategy, seed) for strategy in NUM_SEEDS for seed in range(30)]
    assert cases == [draw(case.strategy, case.seed) for case in cases]
    assert len({str(case) for case in cases}) > 140
    for case in cases:
        assert case == possible(case), case
        assert all(simpler != case for simpler in simplifications(case))
