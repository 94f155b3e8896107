"""A rank that fails, is killed or is stuck while the others wait for it in NCCL: all end soon, and the user reads why.

Each runs the script of :mod:`tests.faults`, of which this tries all moments: ``python -m tests.faults --accelerator gpu
--worlds 1x2 --strategies ddp_ext fabric``.
"""

from pathlib import Path

import pytest

from tests.faults.cases import Case, try_case
from tests.gpu.devices import ACCELERATOR, ON_CPU, Ranks

#: Nothing but a hang takes so long, in seconds; NCCL's own watchdog waits for ten minutes.
HANGS_S = 60


def case(kind: str, moment: str, rank: int, strategy: str = "ddp_ext") -> Case:
    return Case(kind, moment, rank, strategy, 2, hosts=1 if ON_CPU else 2, accelerator=ACCELERATOR)


CASES = [
    case("exception", "backward", 1),
    case("exception", "end of epoch", 0),
    case("sigkill", "forward", 1),
    case("sigkill", "optimizer step", 0),
    case("sigkill", "predict", 1),
    case("sigterm", "forward", 1),
    case("sigsegv", "validation", 1),
    case("os_exit", "backward", 1),
    case("sleep", "forward", 1),
    case("sleep", "validation", 0),
    case("sigstop", "backward", 1),
    case("hold_gil", "optimizer step", 0),
    case("collective", "forward", 1),
    case("exception", "optimizer step", 1, "fabric"),
    case("sigkill", "backward", 0, "fabric"),
    case("sleep", "forward", 1, "fabric"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_end_soon_and_say_why(case: Case, two_ranks: Ranks, tmp_path: Path) -> None:
    result = try_case(case, tmp_path, limit_s=HANGS_S)
    assert result.problems == [], result.output
    print(f"{case}: {result.seconds:.1f} s, exit codes {result.exit_codes}\n{result.output}")
