"""Compares this checkout with all records, or rewrites them: ``python -m tests.guards [--write]``."""

import argparse
import os

from tests.guards import calls_per_step, surfaces
from tests.support.ranks import WITHOUT_MPI


def main() -> int:
    """Prints the calls per step and all differences; returns 1 if there is one."""
    parser = argparse.ArgumentParser(prog="python -m tests.guards", description=__doc__)
    parser.add_argument("--write", action="store_true", help="rewrite the records")
    writes = parser.parse_args().write
    os.environ.update(WITHOUT_MPI)
    calls = calls_per_step.measure_all()
    if writes:
        calls_per_step.write(calls)
        surfaces.write_all()
        return 0
    differences = [calls_per_step.explain(*key, measured) for key, measured in calls.items()]
    differences += [surface.difference() for surface in surfaces.surfaces()]
    print(*filter(None, differences), sep="\n")
    return int(any(differences))


if __name__ == "__main__":
    raise SystemExit(main())
