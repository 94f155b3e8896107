"""``examples/spawn_without_trainer.py``: two workers find the same clusters as one worker."""

from pathlib import Path

import pytest

from tests.support.examples import assert_shows_something, number, rows, run_example

pytestmark = pytest.mark.processes

DISTANCE = "mean squared distance, best run"


def test_two_workers_find_what_one_finds(tmp_path: Path) -> None:
    options = ("--beginnings", "5")
    two = run_example("spawn_without_trainer.py", *options, "--plot", "centers.png", directory=tmp_path)
    one = run_example("spawn_without_trainer.py", *options, "--workers", "1", directory=tmp_path)
    assert [rows(output)["workers"] for output in (two, one)] == [["2"], ["1"]]
    assert number(two, DISTANCE) == pytest.approx(number(one, DISTANCE), rel=1e-4)
    assert number(two, DISTANCE) < number(two, "mean squared distance, worst run")
    assert number(two, "purity of the best run") > 0.7
    assert_shows_something(tmp_path / "centers.png")
