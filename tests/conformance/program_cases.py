"""The programs of this repository as cases; see :mod:`tests.conformance.programs`."""

import time
from typing import Any

from tests.conformance import programs
from tests.conformance.outcomes import FAILED, PASSED, SKIPPED, Outcome
from tests.conformance.torch_cases import reason
from tests.support import ranks

LIMIT_S = 90


def names() -> list[str]:
    """Returns the names of all programs."""
    return list(programs.all_programs())


def modules() -> list[str]:
    """Returns the modules of all programs."""
    return [f"{programs.__name__}.{name}" for name in programs.MODULES]


def run(name: str, backend: str) -> Outcome:
    """Runs a program in new ranks."""
    begin = time.monotonic()
    world_size = programs.all_programs()[name].world_size
    outcomes = ranks.outcomes_of_ranks(programs.run, backend, name, world_size=world_size, timeout_s=LIMIT_S)
    seconds = time.monotonic() - begin
    if failed := [outcome for outcome in outcomes if outcome.error is not None or outcome.exit_code != 0]:
        why = reason(failed[0].error or "") or f"rank {failed[0].rank} exited with code {failed[0].exit_code}"
        return Outcome(FAILED, why, seconds, "\n".join(map(str, outcomes)))
    values: list[tuple[str, Any]] = [outcome.value for outcome in outcomes]
    if values[0][0] == "skipped":
        return Outcome(SKIPPED, values[0][1], seconds)
    return Outcome(PASSED, seconds=seconds, result=[value for _, value in values])


def compared(gloo: Outcome, shm: Outcome) -> Outcome:
    """Returns the outcome over ``shm``, changed to a failure if its results differ from those of gloo."""
    if gloo.kind != PASSED or shm.kind != PASSED:
        return shm
    difference = programs.difference(shm.result, gloo.result)
    return Outcome(FAILED, f"differs from gloo: {difference}", shm.seconds, difference) if difference else shm
