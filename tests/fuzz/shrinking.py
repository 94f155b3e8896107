"""Finds the smallest case that fails: simplifies one drawn choice at a time, as long as the case still fails."""

from tests.fuzz.cases import simplifications
from tests.fuzz.checking import Pools, Result, check
from tests.fuzz.pool import CASE_LIMIT_S


def shrink(result: Result, pools: Pools, limit_s: float = CASE_LIMIT_S, max_runs: int = 150) -> Result:
    """Returns the result of the smallest case found, which fails too.

    Args:
        result: Result of the case that fails.
        pools: Processes that run cases.
        limit_s: Seconds that a case may take.
        max_runs: Maximum number of cases to run.
    """
    num_runs = 0
    while True:
        for simpler in simplifications(result.case):
            if (num_runs := num_runs + 1) > max_runs:
                return result
            found = check(simpler, pools, limit_s)
            if found.kind == "wrong":
                result = found
                break
        else:
            return result
