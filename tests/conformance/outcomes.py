"""The outcome of a case with one backend."""

from dataclasses import dataclass
from typing import Any

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
BACKENDS = ("gloo", "shm")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Attributes:
        kind: "passed", "failed" or "skipped".
        why: Reason of a failed or skipped case, in one line.
        seconds: Run time in seconds.
        details: Traceback and output of a failed case.
        result: Results of a program on each rank.
        attempts: Number of runs of the case.
    """

    kind: str
    why: str = ""
    seconds: float = 0.0
    details: str = ""
    result: Any = None
    attempts: int = 1


#: Outcomes by case, and by backend.
Outcomes = dict[str, dict[str, Outcome]]
