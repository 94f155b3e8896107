"""Tests combinations of features: ``python -m tests.combinations --report docs/combinations.md`` writes the page.

python -m tests.combinations --strategies ddp_ext --only EMA accumulation   # some cells
python -m tests.combinations --strategies ddp_ext --fault "ranks differ"     # every cell has to fail

The results are in ``tests/combinations/cell_results``, one file per strategy; ``--report`` reads these files.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

from tests.combinations.cells import Cell, run_cells
from tests.combinations.features import reference_of
from tests.combinations.report import report
from tests.combinations.table import STRATEGIES, cells_of, compare_cells, fixed_part, name_of, reference_strategy
from tests.support.ranks import REPOSITORY

#: Number of cells after which the results are written.
AT_ONCE = 60
RESULTS = REPOSITORY / "tests" / "combinations" / "cell_results"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.combinations", description=__doc__.partition("\n")[0])
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--only", nargs="+", help="run only cells with one of these features")
    parser.add_argument("--fixed", action="store_true", help="run only the cells of the test suite")
    parser.add_argument("--missing", action="store_true", help="run only cells without a result")
    parser.add_argument("--fault", help="fault to inject into the gradients, so that cells must fail")
    parser.add_argument("--stock", action="store_true", help="compare ddp_ext with Lightning's `ddp`, bit by bit")
    parser.add_argument("--report", type=Path, help="page to write from all results")
    arguments = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    all_references: dict[str, dict[Cell, object]] = {}
    is_wrong = False
    for strategy in arguments.strategies:
        cells = [cell for cell in cells_of(strategy) if not arguments.only or set(cell) & set(arguments.only)]
        cells = fixed_part(strategy) if arguments.fixed else cells
        path = RESULTS / f"{strategy}.json"
        recorded = json.loads(path.read_text()) if path.exists() else {}
        if arguments.missing:
            cells = [cell for cell in cells if name_of(cell) not in recorded]
        elif arguments.fault is None and not (arguments.only or arguments.fixed):
            recorded.clear()
        start, counts = time.monotonic(), Counter[str]()
        for first in range(0, len(cells), AT_ONCE):
            part = cells[first : first + AT_ONCE]
            alone = reference_strategy(strategy)
            references = all_references.setdefault(alone, {})
            missing = [cell for cell in dict.fromkeys(map(reference_of, part)) if cell not in references]
            references |= {cell: found[0] for cell, found in run_cells(alone, missing).items()}
            cell_results = compare_cells(strategy, part, references, arguments.fault, arguments.stock)
            for cell, cell_result in cell_results.items():
                counts[cell_result.status] += 1
                if cell_result.status != "right":
                    print(f"{strategy}: {name_of(cell)}: {cell_result.status}: {cell_result.text}")
            print(f"{strategy}: {dict(counts)} in {time.monotonic() - start:.0f} s", flush=True)
            if arguments.fault is None:
                recorded |= {
                    name_of(cell): [cell_result.status, cell_result.text] for cell, cell_result in cell_results.items()
                }
                in_order = {name: recorded[name] for name in map(name_of, cells_of(strategy)) if name in recorded}
                path.write_text(json.dumps(in_order, indent=1, ensure_ascii=False) + "\n")
        is_wrong |= counts["wrong"] > 0
    if arguments.report is not None:
        results = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
        arguments.report.write_text(report(results))
    sys.exit(int(is_wrong))


if __name__ == "__main__":
    main()
