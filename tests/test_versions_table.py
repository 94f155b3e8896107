"""``docs/versions.md`` and ``docs/version_tests.md``: a run of one corner does not change other corners."""

import json
from pathlib import Path
from typing import Any

import pytest

from docs import versions_table
from tests.support.ranks import run_script

pytestmark = pytest.mark.processes

TESTS = """
import os, pytest

def test_passes(): pass
def test_fails(): assert False
def test_skips(): pytest.skip("no second\\nhost here")
@pytest.mark.skipif(True, reason="too old | too new")
def test_is_not_for_this_version(): pass
@pytest.fixture
def broken(): raise OSError
def test_has_no_fixture(broken): pass
@pytest.fixture
def left(): yield; raise OSError
def test_passes_and_leaves_a_mess(left): pass
@pytest.mark.forked
def test_dies(): os._exit(3)
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provides a report of pytest on tests with all kinds of results."""
    directory = tmp_path_factory.mktemp("tested")
    (directory / "test_it.py").write_text(TESTS)
    options = ("-p", "no:cacheprovider", "--junitxml=report.xml")
    assert run_script("-m", "pytest", *options, "test_it.py", cwd=directory).returncode == 1
    return directory / "report.xml"


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provides a directory with both pages, each with the lines around its generated part."""
    page = f"# Versions\n\nBefore.\n\n{versions_table.BEGIN}\n{versions_table.END}\n\nAfter.\n"
    for variable, name in (("PAGE", "versions.md"), ("DETAILS", "version_tests.md")):
        (tmp_path / name).write_text(page)
        monkeypatch.setattr(versions_table, variable, tmp_path / name)
    monkeypatch.setattr(versions_table, "RESULTS", tmp_path / "versions.json")
    return tmp_path


def rows(pages: Path) -> dict[str, list[str]]:
    """Returns the cells of each corner's row."""
    lines = [line for line in (pages / "versions.md").read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert {len(row) for row in cells} == {len(cells[0])}
    return {row[0]: row[1:] for row in cells[2:]}  # without the header and the ruler


def details(pages: Path) -> str:
    """Returns the page with the failed and skipped tests."""
    return (pages / "version_tests.md").read_text()


def results(pages: Path) -> Any:
    return json.loads((pages / "versions.json").read_text())


def test_each_test_counts_once_and_a_skip_keeps_its_reason(report: Path) -> None:
    seen = versions_table.outcomes([report])
    assert seen["passed"] == 1
    assert sorted(name.partition("::")[2] for name in seen["failed"]) == [
        *("test_dies", "test_fails", "test_has_no_fixture", "test_passes_and_leaves_a_mess"),
    ]
    assert seen["skipped"] == {
        "no second\nhost here": ["test_it::test_skips"],
        "too old | too new": ["test_it::test_is_not_for_this_version"],
    }


def test_a_test_that_was_interrupted_counts_as_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_passes(): pass\ndef test_is_stopped(): raise KeyboardInterrupt\n")
    options = ("-p", "no:cacheprovider", "--junitxml=report.xml")
    assert run_script("-m", "pytest", *options, "test_it.py", cwd=tmp_path).returncode == 2
    seen = versions_table.outcomes([tmp_path / "report.xml"])
    assert (seen["passed"], seen["failed"], seen["skipped"]) == (1, [], {})


def test_a_run_of_one_corner_leaves_the_others_and_the_text_around(pages: Path, report: Path) -> None:
    versions_table.main(["py399", "--problem", "no Python 3.99 was found"])
    before = rows(pages)
    versions_table.main(["py310", "--tests", "make test", "--report", str(report)])
    after = rows(pages)
    assert list(after) == ["py310", "py399"]
    assert after["py399"] == before["py399"]
    assert after["py310"][4:8] == ["`make test`", "1", "4", "2"]
    for page in ((pages / "versions.md").read_text(), details(pages)):
        assert page.startswith("# Versions\n\nBefore.\n\n")
        assert page.endswith("\n\nAfter.\n")
    assert "- skipped: no second host here (`test_it::test_skips`)\n" in details(pages)
    assert "- failed: `test_it::test_fails`\n" in details(pages)
    versions_table.main(["py310", "--report", str(report)])
    assert details(pages).count("## py310\n") == 1


def test_a_corner_that_could_not_run_has_the_reason(pages: Path, tmp_path: Path) -> None:
    versions_table.main(["py399", "--problem", "no Python 3.99 was found"])
    versions_table.main(["py310", "--report", str(tmp_path / "there is none")])
    assert [row[5] for row in rows(pages).values()] == ["not run", "not run"]
    assert "Not run: no Python 3.99 was found." in details(pages)
    assert "Not run: pytest ended without a report." in details(pages)


def test_a_run_that_ended_early_is_not_taken_for_a_whole_one(pages: Path, report: Path) -> None:
    versions_table.main(["py310", "--report", str(report), "--problem", "the run was interrupted"])
    assert rows(pages)["py310"][5:8] == ["1 (not all run)", "4", "2"]
    assert "Not all tests have run: the run was interrupted." in details(pages)


def test_the_results_of_two_runs_are_one_row(pages: Path, report: Path) -> None:
    versions_table.main(["default", "--report", str(report), str(report)])
    assert rows(pages)["default"][4:8] == ["`make test-all`", "2", "8", "4"]


def test_a_corner_without_horovod_has_the_result_of_the_build(pages: Path, report: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"Fetching the source.\n\nNinja is not here: {Path.home()}/bin is empty.\n")
    versions_table.main(["py310", "--report", str(report), "--horovod-log", str(log)])
    assert rows(pages)["py310"][3] == "none"
    assert "No Horovod: Fetching the source. Ninja is not here: ~/bin is empty.\n" in details(pages)


def test_a_note_is_shown_until_its_corner_runs_again(pages: Path, report: Path) -> None:
    versions_table.main(["py310", "--report", str(report)])
    recorded = results(pages)
    recorded["py310"]["note"] = "One file was run a second time."
    (pages / "versions.json").write_text(json.dumps(recorded))
    versions_table.main(["py399", "--problem", "no Python 3.99 was found"])
    assert "One file was run a second time." in details(pages)
    versions_table.main(["py310", "--report", str(report)])
    assert "One file was run a second time." not in details(pages)


def test_a_page_without_the_markers_of_the_table_is_rejected(pages: Path) -> None:
    (pages / "versions.md").write_text("# Versions\n")
    with pytest.raises(ValueError, match="lacks the lines"):
        versions_table.main(["py399", "--problem", "no Python 3.99 was found"])
    assert (pages / "versions.md").read_text() == "# Versions\n"
