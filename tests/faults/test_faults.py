"""Runs a part of the cases of fault injection; ``make fault-injection`` runs all cases."""

from pathlib import Path

import pytest

from tests.faults.cases import KINDS, Case, Result, all_cases, try_case
from tests.support.namespace_hosts import NoHostsError

CASES = [
    Case("sigkill", "predict", 1, "ddp_ext", 2),
    Case("sigstop", "forward", 0, "ddp_ext", 2),
    Case("sleep", "end of epoch", 2, "ddp_ext", 3),
    Case("hold_gil", "validation", 1, "ddp_spawn_ext", 2),
    Case("base_exception", "backward", 0, "ddp_spawn_ext", 2),
    Case("sigsegv", "optimizer step", 1, "horovod_ext", 2),
    Case("os_exit", "forward", 1, "fabric", 2),
    Case("cable", "backward", 3, "ddp_ext", 4, hosts=2),
    Case("os_exit", "predict", 1, "horovod_ext", 2, hosts=2),
    Case("cable", "teardown", 0, "horovod_ext", 2, hosts=2),
]
#: Time limit in seconds, which only a hang reaches; `make fault-injection` has strict limits.
HANGS_S = 90
#: Less than Horovod's timeout of 30 seconds for a lost host, for which ranks must not wait.
BEFORE_HOROVOD_S = 27


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_ranks_exit_soon_and_report_the_reason(case: Case, tmp_path: Path):
    limit_s = BEFORE_HOROVOD_S if (case.kind, case.strategy) == ("cable", "horovod_ext") else HANGS_S
    try:
        result = try_case(case, tmp_path, limit_s=limit_s)
    except NoHostsError as error:
        pytest.skip(str(error))
    assert result.problems == [], result.output


def test_the_cases_cover_each_kind_at_each_moment():
    cases = list(all_cases())
    assert len(cases) > 1000
    assert {case.kind for case in cases} == set(KINDS)
    assert set(CASES) <= set(cases)


def test_an_unexpected_result_is_described():
    case = Case("exception", "forward", 1, "ddp_ext", 2)
    assert Result(case, 3.0, [1], "ValueError: the first cause").problems == []
    assert len(Result(case, None, [0], "", ["a file is left"]).problems) == 4
    late = Result(case, 10.5, [1], "ValueError: the first cause")
    assert late.problems != []
    assert late.is_late_only
    on_hosts = Case("os_exit", "forward", 2, "ddp_ext", 4, 2)
    assert Result(on_hosts, 3.0, [1, 0], "exit code 0").problems == []  # if the user's script requests this exit code
    assert Result(on_hosts, 3.0, [0, 0], "exit code 0").problems == ["an exit code is 0"]
