"""Runs a part of the table of combinations, with all features and strategies. ``make combinations`` runs all cells."""

import importlib.util

import pytest

from tests.combinations.cells import Cell, run_cells
from tests.combinations.features import FEATURES, reference_of
from tests.combinations.table import (
    ALL_PAIRS,
    STRATEGIES,
    cells_of,
    compare_cells,
    fixed_part,
    name_of,
    reference_strategy,
)
from tests.combinations.training import FAULTS

pytestmark = pytest.mark.processes


def results_of(strategy: str, cells: list[Cell], fault: str | None = None) -> dict[str, tuple[str, str]]:
    needed = list(dict.fromkeys(map(reference_of, cells)))
    references = {cell: found[0] for cell, found in run_cells(reference_strategy(strategy), needed).items()}
    return {name_of(cell): (v.status, v.text) for cell, v in compare_cells(strategy, cells, references, fault).items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_feature_is_right_or_refused(strategy):
    if "ray" in strategy and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed (pip install 'ray>=2.60,<3')")
    cell_results = results_of(strategy, fixed_part(strategy))
    assert {name: cell_result for name, cell_result in cell_results.items() if cell_result[0] == "wrong"} == {}
    assert any(status == "right" for status, _ in cell_results.values())


def test_combinations_that_once_failed_are_right():
    # Weights differed where a rank without data had used a parameter; Horovod refused sparse gradients in bfloat16.
    cell_results = results_of(
        "horovod_ext", [("unused parameters", "uneven inputs: join"), ("bf16-true", "sparse embedding")]
    )
    assert {status for status, _ in cell_results.values()} == {"right"}, cell_results


def test_the_fixed_part_has_every_feature():
    for strategy in ALL_PAIRS:
        features = {feature.name for feature in FEATURES if strategy in feature.strategies}
        assert {name for cell in fixed_part(strategy) for name in cell} == features
        assert set(fixed_part(strategy)) <= set(cells_of(strategy))


#: Tolerance of each closeness, for parameters and for other values.
SENSITIVE = [(), ("bf16-mixed",), ("EMA", "several stages"), ("manual optimization", "accumulation"), ("LBFGS",)]


@pytest.mark.parametrize("fault", [*FAULTS, "no exchange"])
def test_cells_fail_if_gradients_are_wrong(fault):
    cell_results = results_of("ddp_ext", SENSITIVE, fault)
    assert {name: status for name, (status, _) in cell_results.items() if status != "wrong"} == {}


def test_a_lossy_cell_fails_if_ranks_differ():
    averaged = ("compression localsgd", "compression diloco")  # the gradients of the ranks differ in any case
    lossy = [
        f.name for f in FEATURES if f.closeness != "exact" and "ddp_ext" in f.strategies and f.name not in averaged
    ]
    cell_results = results_of("ddp_ext", [(name,) for name in lossy], "ranks differ")
    assert {name: status for name, (status, _) in cell_results.items() if status != "wrong"} == {}
