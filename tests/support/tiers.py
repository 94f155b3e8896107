"""The tiers of tests: hooks of pytest, which ``tests/conftest.py`` imports.

    def test_a_pure_function(): ...         # `make check`, `make test`, `make test-all`

    @pytest.mark.processes                  # starts a process, itself or in a fixture
    def test_two_ranks(): ...               # `make test-all`; `make test` if the table of tests/README.md names it

The hooks mark the tests that represent a promise. They fail a test that starts a process without the marker, or that
took longer than its time limit. They skip the tests of a run that has no time left.
"""

import os
import re
import sys
from collections.abc import Generator
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import perf_counter, time  # the functions, because a test may replace those of the module
from typing import Any

import pytest

#: Audit events (PEP 578) of the calls that start a process.
_EVENTS = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "pty.spawn", "subprocess.Popen"})
#: The test that runs in this process, if it must not start one.
_test_without_processes: pytest.Item | None = None
_started_s = pytest.StashKey[float]()
#: Tests that pytest has collected, before it selects some by their markers.
collected_tests = pytest.StashKey[list[pytest.Item]]()
#: Time at which the run ends, in seconds since the epoch, if `.ci/run` has set it: a test that begins later is skipped.
#: A slow machine could not finish otherwise, and would report nothing.
_end_s = float(os.environ.get("TESTS_END", "inf"))
_TABLE = Path(__file__).parents[1] / "README.md"


def representative_tests() -> list[str]:
    """Returns the identifiers of the table of promises: of files, of tests, and of tests with parameters."""
    return re.findall(r"\| `(tests/[^`]+)` \|$", _TABLE.read_text(), re.MULTILINE)


def represents(test: str, item: pytest.Item) -> bool:
    """Returns whether an identifier of :func:`representative_tests` is this test or its file."""
    return item.nodeid == test or item.nodeid.startswith((f"{test}[", f"{test}::"))


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Adds the markers ``representative``, and ``processes`` to tests that pytest-forked runs in a process.

    If the time of the run is limited, each run begins with a different file, and so leaves out different tests.
    """
    if _end_s < float("inf"):
        start = int(_end_s) % len(items)
        start = next(i for i in range(start, -1, -1) if i == 0 or items[i].path != items[i - 1].path)
        items[:] = [*items[start:], *items[:start]]
    config.stash[collected_tests] = list(items)
    tests = representative_tests()
    for item in items:
        if item.get_closest_marker("forked"):
            item.add_marker("processes")
        if any(represents(test, item) for test in tests):
            item.add_marker("representative")


def _refuse_process(event: str) -> None:
    if _test_without_processes is not None:
        pytest.fail(f"This test starts a process ({event}): mark it with @pytest.mark.processes.")


def _audit(event: str, _: tuple[Any, ...]) -> None:
    if event in _EVENTS:
        _refuse_process(event)


def _start(process: BaseProcess) -> None:
    _refuse_process("multiprocessing")
    _start_process(process)


def detect_processes() -> None:
    """Makes calls that start a process fail the test that runs, if it has no marker ``processes``."""
    sys.addaudithook(_audit)
    # multiprocessing's start methods "spawn" and "forkserver" raise no audit event.
    BaseProcess.start = _start  # type: ignore[method-assign]


_start_process = BaseProcess.start


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Records that a test without the marker ``processes`` runs, including the setup of its fixtures."""
    global _test_without_processes
    _test_without_processes = None if item.get_closest_marker("processes") else item
    # This hook runs first: before pytest-timeout starts its timer, so that the time is never less than the timer's.
    item.stash[_started_s] = perf_counter()
    try:
        return (yield)
    finally:
        _test_without_processes = None


@pytest.hookimpl(tryfirst=True)  # before the fixtures of the test
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test of a run that has no time left. Pytest reports such tests with their file."""
    if time() > _end_s:
        pytest.skip(f"the time of this run was over before {item.path.name}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fails a test that passed although its time limit fired.

    pytest-timeout raises an exception in the main thread. Python discards an exception that is raised in a finalizer or
    in a callback of a weak reference, so a test can hang until its limit there, and then pass.
    """
    report = yield
    elapsed_s = perf_counter() - item.stash[_started_s]
    limit_s = _time_limit_s(item)
    if report.passed and 0 < limit_s <= elapsed_s:
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} took {elapsed_s:.0f} s, more than its time limit of {limit_s:g} s. Python discarded"
            " the exception of the limit, probably in a finalizer or a callback."
        )
    return report


def _time_limit_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        return float(marker.args[0] if marker.args else marker.kwargs.get("timeout", 0))
    option = item.config.getoption("timeout", None)
    return float(item.config.getini("timeout") or 0 if option is None else option)
