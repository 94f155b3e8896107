"""What came of a case with one backend."""

from dataclasses import dataclass
from typing import Any

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
BACKENDS = ("gloo", "shm")


@dataclass(frozen=True)
class Outcome:
    """What came of one case.

    Attributes:
        kind: "passed", "failed" or "skipped".
        why: If not passed, in one line.
        seconds: How long it took.
        details: All that is known of a failure.
        result: What a program has computed, on each rank.
        attempts: How often it was run.
    """

    kind: str
    why: str = ""
    seconds: float = 0.0
    details: str = ""
    result: Any = None
    attempts: int = 1


#: By case, and by backend.
Outcomes = dict[str, dict[str, Outcome]]
