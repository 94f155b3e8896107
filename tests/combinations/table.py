"""The table of combinations: the cells of each strategy, and their results."""

from itertools import zip_longest

from tests.combinations.cells import Cell, run_cells
from tests.combinations.comparison import CellResult, compare
from tests.combinations.features import pairs, reference_of
from tests.combinations.refusals import refusals_of

#: Strategies with all pairs, and strategies that only add a launcher.
ALL_PAIRS = ("ddp_ext", "dp_ext", "horovod_ext")
LAUNCHED = (
    *("ddp_spawn_ext", "ddp_fork_ext", "ddp_spawn_elastic_ext"),
    *("ddp_ray_ext", "ddp_ray_elastic_ext"),
)
FABRIC = ("fabric ddp_ext", "fabric dp_ext", "fabric horovod_ext")
STRATEGIES = (*ALL_PAIRS, *LAUNCHED, *FABRIC)
#: Features whose state a launcher must transfer to ranks and back, or restore after the loss of a rank.
OF_LAUNCHER = ("resume", "several stages", "EMA", "compiled submodule")


def cells_of(strategy: str) -> list[Cell]:
    """Returns the cells of a strategy: all pairs, or each feature alone and the pairs that involve the launcher."""
    cells = pairs(strategy)
    if strategy in ALL_PAIRS:
        return cells
    if strategy in FABRIC:
        return [cell for cell in cells if len(cell) < 2]
    selected = [cell for cell in cells if len(cell) < 2 or set(cell) <= {*OF_LAUNCHER, "accumulation", "schedulers"}]
    return [cell for cell in selected if len(cell) < 2 or set(cell) & set(OF_LAUNCHER)]


def name_of(cell: Cell) -> str:
    """Returns the name of a cell in the tables."""
    return " + ".join(cell)


def reference_strategy(strategy: str) -> str:
    """Returns the name of the reference of a strategy: one device, with the Trainer or with Fabric."""
    return "fabric one device" if strategy in FABRIC else "one device"


def compare_cells(
    strategy: str,
    cells: list[Cell],
    references: dict[Cell, object],
    fault: str | None = None,
    with_stock: bool = False,
) -> dict[Cell, CellResult]:
    """Runs cells and returns their results. Lightning's ``ddp`` also runs each cell that fails.

    Args:
        strategy: Name of the strategy.
        cells: Cells to run.
        references: Observations of one device, by :func:`reference_of`.
        fault: See :func:`.run_cells`.
        with_stock: Whether Lightning's ``ddp`` runs all cells.
    """
    found = run_cells(strategy, cells, fault)
    cell_results = {cell: compare(cell, found[cell], references[reference_of(cell)]) for cell in cells}
    for cell, cell_result in cell_results.items():
        _check_refusal(strategy, cell, cell_result)
    if strategy in ("dp_ext", "horovod_ext", *FABRIC) or fault is not None:
        return cell_results
    for_stock = [
        cell
        for cell in cells
        if (with_stock or cell_results[cell].status == "wrong")
        and not any(name.startswith(("uneven", "compression", "buckets by trial")) for name in cell)
    ]
    stock = run_cells("ddp", for_stock)
    for cell in for_stock:
        cell_results[cell] = compare(cell, found[cell], references[reference_of(cell)], stock[cell])
        _check_refusal(strategy, cell, cell_results[cell])
    return cell_results


def _check_refusal(strategy: str, cell: Cell, cell_result: CellResult) -> None:
    """Changes a result to wrong if the cell is refused unexpectedly, or trains although a refusal is expected."""
    expected = refusals_of(strategy, cell)
    if cell_result.status == "refused" and not any(refusal.explains(cell_result.text) for refusal in expected):
        cell_result.status, cell_result.text = "wrong", f"refused, but not listed in `refusals.py`: {cell_result.text}"
    elif cell_result.status == "right" and expected:
        cell_result.status, cell_result.text = "wrong", f"trains, but is listed in `refusals.py`: {expected[0].text}"


def fixed_part(strategy: str) -> list[Cell]:
    """Returns cells with each feature of a strategy once; for launched strategies, two cells with launcher features."""
    if strategy in LAUNCHED:
        return [("resume", "several stages"), ("accumulation", "EMA")]
    names = [cell[0] for cell in cells_of(strategy) if len(cell) == 1]
    if strategy in FABRIC:
        return [(name,) for name in names]
    known, half = set(cells_of(strategy)), (len(names) + 1) // 2
    cells: list[Cell] = []
    for name, other in zip_longest(names[:half], names[half:]):
        if (name, other) in known:
            cells.append((name, other))
        else:
            cells += [(each,) for each in (name, other) if each is not None]
    return cells
