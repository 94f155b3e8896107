"""``--against REV`` of the benchmarks: the current program measures both revisions, and leaves no files."""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks import against, names
from tests.support.ranks import REPOSITORY, run_script

PACKAGE = "lightning_strategies_ext"


def git(repository: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    command = ["git", "-C", repository, *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def checkout() -> Path:
    if not (REPOSITORY / ".git").exists():
        pytest.skip("the tests are not in a git checkout, so there is no other revision")
    return REPOSITORY


@pytest.fixture
def repository() -> Iterator[Path]:
    """Creates a repository with two commits: the first lacks messages between hosts, the second is the working tree."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        ignored = shutil.ignore_patterns("__pycache__", "results", "pytorch_lightning")
        for name in (PACKAGE, "benchmarks"):
            shutil.copytree(REPOSITORY / name, root / name, ignore=ignored)
        (root / ".gitignore").write_text("__pycache__/\n")
        hosts = root / PACKAGE / "failure" / "remote_status.py"
        text = hosts.read_text()
        hosts.unlink()
        git(root, "init", "--quiet")
        for message in ("without messages between hosts", "with messages between hosts"):
            git(root, "add", "--all")
            git(root, "commit", "--quiet", "--message", message)
            hosts.write_text(text)
        yield root


def run_benchmark(root: Path, program: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = ("-m", f"benchmarks.{program}", *map(str, arguments))
    return run_script(*command, cwd=root, env={"PYTHONPATH": str(root)})


@pytest.mark.processes
def test_ranks_of_two_revisions_take_turns_and_the_worktree_is_removed(checkout, tmp_path):
    before = git(checkout, "worktree", "list")
    options = ("--part", "sizes", "--ranks", 2, "--rounds", 2, "--rows", "ranks, 4 B", "--output", tmp_path)
    done = run_benchmark(checkout, "collectives", "--against", "HEAD", *options)
    assert done.returncode == 0, done.stdout
    assert git(checkout, "worktree", "list") == before
    (file,) = tmp_path.glob("collectives_against_*.json")
    written = json.loads(file.read_text())
    short = git(checkout, "rev-parse", "--short", "HEAD").strip()
    assert written["native library"] == {"today": True, short: True}
    assert [row["row"] for row in written["results"]] == ["2 ranks, 4 B: shm, us", "2 ranks, 4 B: gloo, us"]
    for row in written["results"]:
        today, other = (row["rounds"][name] for name in ("today", short))
        assert [len(today), len(other)] == [2, 2]
        ratios = sorted(above / below for above, below in zip(today, other, strict=True))
        found = row[f"today/{short}"]
        assert [found["minimum"], found["maximum"]] == pytest.approx(ratios, rel=1e-3)
        assert f"{found['median']:.3f} [" in done.stdout
        assert row["row"] in done.stdout


@pytest.mark.processes
def test_rows_that_a_revision_lacks_are_named_and_the_others_are_measured(repository, tmp_path):
    package = repository / PACKAGE
    (package / "failure" / "local_status.py").open("a").write("\n")
    options = ("--ranks", 2, "--hosts", 8, "--rounds", 1, "--output", tmp_path)
    done = run_benchmark(repository, "failure_monitor", "--against", "HEAD~1", *options)
    assert done.returncode == 0, done.stdout
    short = git(repository, "rev-parse", "--short", "HEAD~1").strip()
    assert (
        f"omitted: messages of 8 hosts to rank 0 ({short} has no failure.remote_status:RemoteStatus and 1 more names)"
        in done.stdout
    )
    assert "heartbeat, 2 ranks on the host" in done.stdout
    assert "with messages between hosts, with changes that are not committed" in done.stdout
    assert f"{short}: {short}" in done.stdout
    assert "without messages between hosts" in done.stdout


@pytest.mark.processes
def test_an_interrupt_ends_all_processes_and_removes_the_worktree(repository):
    before = git(repository, "worktree", "list")
    options = ["--against", "HEAD", "--ranks", "2", "--rows", "heartbeat", "--rounds", "100000"]
    command = [sys.executable, "-m", "benchmarks.failure_monitor", *options]
    process = subprocess.Popen(command, cwd=repository, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        while "round 2 of" not in (line := process.stderr.readline()):
            assert line, "the benchmark has ended"
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) == 2
        assert git(repository, "worktree", "list") != before
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode != 0
        assert psutil.wait_procs(started, timeout=10)[1] == []
        assert git(repository, "worktree", "list") == before
    finally:
        process.kill()
        process.wait()


@pytest.mark.processes
def test_an_unknown_revision_is_one_clear_error(checkout, capsys):
    parser = argparse.ArgumentParser(prog="step_time")
    against.add_arguments(parser)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--against", "no-such-revision"])
    assert ended.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "step_time: error: argument --against: there is no commit 'no-such-revision'" in error
    assert "git fetch --unshallow" in error


def test_a_revision_is_measured_in_its_own_directory_or_not_at_all(monkeypatch, tmp_path):
    names.check_package()
    monkeypatch.setenv(names.PACKAGE_VARIABLE, str(tmp_path))
    with pytest.raises(RuntimeError, match="the revision to be measured"):
        names.check_package()


@pytest.mark.parametrize("key", names.NAMES)
def test_the_working_tree_has_every_name_of_the_table(key):
    assert names.resolve(names.NAMES[key][0]) is not None


def test_an_older_location_serves_where_a_revision_lacks_the_newer_one(monkeypatch):
    monkeypatch.setitem(names.NAMES, "table", ("failure.no_such_module:Name", "failure.local_status:StatusTable"))
    monkeypatch.setitem(names.NAMES, "argument", (":DDPStrategy(no_such_argument)", ":DDPStrategy(start_method)"))
    monkeypatch.setitem(
        names.NAMES,
        "method",
        ("failure.local_status:StatusTable.open", "failure.local_status:StatusTable.open_for_host"),
    )
    assert names.table is names.StatusTable
    assert names.argument == "start_method"
    assert names.method == names.StatusTable.open_for_host
    assert names.find_missing(["table", "argument", "method"]) == []


def test_a_name_that_a_revision_lacks_is_named(monkeypatch):
    monkeypatch.setitem(names.NAMES, "gone", ("failure.no_such_module:Name", ":NoSuchName"))
    assert names.find_missing(["gone", "DDPStrategy"]) == ["failure.no_such_module:Name"]
    with pytest.raises(names.MissingNameError, match=r"has no failure\.no_such_module:Name or :NoSuchName"):
        _ = names.gone
