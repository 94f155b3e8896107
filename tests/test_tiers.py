"""Tiers of tests: failures of tests that start processes or take too long, and the tests of the table."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.ranks import REPOSITORY
from tests.support.tiers import collected_tests, representative_tests, represents

TESTS = """
import subprocess, sys, time, weakref
import pytest
from multiprocessing import get_context

COMMAND = [sys.executable, "-c", ""]

def test_unmarked_process():
    subprocess.run(COMMAND, check=True)

def test_unmarked_process_of_multiprocessing():
    get_context("spawn").Process(target=int).start()

@pytest.fixture(scope="session")
def process():
    subprocess.run(COMMAND, check=True)

def test_unmarked_process_of_a_fixture(process): pass

@pytest.mark.processes
def test_marked_process():
    subprocess.run(COMMAND, check=True)

class HangsInFinalizer:
    def __del__(self): time.sleep(30)

@pytest.mark.timeout(1)
def test_limit_in_a_finalizer():
    HangsInFinalizer()

class Freed: pass

@pytest.mark.timeout(1)
def test_limit_in_a_callback():
    freed = Freed()
    reference = weakref.ref(freed, lambda _: time.sleep(30))
    del freed

def test_passes(): pass
"""
CONFTEST = """
from tests.support import tiers
from tests.support.tiers import pytest_runtest_makereport, pytest_runtest_protocol

def pytest_configure(config):
    config.addinivalue_line("markers", "processes: starts a process")
    tiers.detect_processes()
"""


@pytest.mark.processes
def test_unmarked_processes_and_exceeded_time_limits_fail_a_test(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rfE", "-W", "ignore", str(tmp_path)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    failures = dict(re.findall(r"^(?:FAILED|ERROR) \S*::(\w+)(.*)$", result.stdout, re.MULTILINE))
    assert failures.keys() == {
        "test_unmarked_process",
        "test_unmarked_process_of_multiprocessing",
        "test_unmarked_process_of_a_fixture",
        "test_limit_in_a_finalizer",
        "test_limit_in_a_callback",
    }, result.stdout
    assert "mark it with @pytest.mark.processes" in result.stdout
    assert "more than its time limit of 1 s" in result.stdout


@pytest.mark.processes
def test_tests_after_the_end_of_a_run_are_skipped_and_their_files_named(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"test_{name}.py").write_text("def test_first(): pass\n\ndef test_second(): pass\n")
    hooks = "from tests.support.tiers import pytest_collection_modifyitems, pytest_runtest_setup\n"
    (tmp_path / "conftest.py").write_text(hooks)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-rs", "-W", "ignore", str(tmp_path)]

    def run(end_s: float) -> str:
        environment = {**os.environ, "TESTS_END": str(end_s)}
        options = {"cwd": REPOSITORY, "env": environment, "capture_output": True, "text": True, "timeout": 600}
        return subprocess.run(command, **options, check=True).stdout

    output = run(time.time() - 1)
    assert "6 skipped" in output, output
    for name in ("a", "b", "c"):
        assert "[2] tests/support/tiers.py" in output
        assert f"the time of this run was over before test_{name}.py" in output, output
    # 6000000000 is in the year 2160. All tests run, in the order of their files, and another file is the first.
    for end_s, files in ((6_000_000_000, "aabbcc"), (6_000_000_003, "bbccaa"), (6_000_000_005, "ccaabb")):
        output = run(end_s)
        assert "6 passed" in output, output
        assert "".join(re.findall(r"test_(\w)\.py::", output)) == files, output


def test_the_table_of_promises_names_tests_that_exist(request: pytest.FixtureRequest) -> None:
    tests = representative_tests()
    assert len(tests) > 40
    assert len(set(tests)) == len(tests)
    for test in tests:
        file, _, name = test.partition("::")
        assert (REPOSITORY / file).is_file(), test
        function = name.partition("[")[0]
        assert not function or f"def {function}(" in (REPOSITORY / file).read_text(), test
    # Parameters are known for all functions that this run has collected, unless the run selects single parameters.
    collected = request.config.stash[collected_tests]
    functions = {item.nodeid.partition("[")[0] for item in collected}
    for test in tests:
        if test.partition("[")[0] in functions and not any("[" in argument for argument in request.config.args):
            items = [item for item in collected if represents(test, item)]
            assert items, f"{test} has no such parameters"
            assert not any(item.get_closest_marker("slow") for item in items), f"{test} runs only with `make slow`"


def test_each_support_module_is_explained() -> None:
    explained = re.findall(r"^\| `(\w+)` \|", (REPOSITORY / "tests" / "README.md").read_text(), re.MULTILINE)
    modules = {path.stem for path in (REPOSITORY / "tests" / "support").glob("*.py")} - {"__init__"}
    assert sorted(explained) == sorted(modules)
