"""``examples/tour.py``: after ``fit``, ``test`` and ``predict``, a script has the same state as with one device."""

import pytest

from tests.support.examples import EXAMPLE_ENVIRONMENT, example_packages
from tests.support.ranks import REPOSITORY, run_script

pytestmark = pytest.mark.processes

#: Strategies that run the script on each rank: each rank has its part of the predictions, as with Lightning's.
OF_ALL_RANKS = {"ddp_spawn_ext": 360, "ddp_fork_ext": 360, "dp_ext": 360, "ddp_ext": 180, "horovod_ext": 180}


def run(strategy):
    with pytest.MonkeyPatch.context() as monkeypatch, example_packages():
        from examples import tour

        for name, value in {**EXAMPLE_ENVIRONMENT, "OMP_NUM_THREADS": "1"}.items():
            monkeypatch.setenv(name, value)
        return tour.run(strategy)


@pytest.fixture(scope="module")
def alone():
    return run(None)


@pytest.mark.parametrize("strategy", OF_ALL_RANKS)
def test_the_results_are_those_of_one_device(strategy, alone):
    seen = run(strategy)
    assert seen.keys() == alone.keys()
    assert seen.pop("predictions in the script") == OF_ALL_RANKS[strategy]
    if OF_ALL_RANKS[strategy] < 360:
        assert seen.pop("accuracy of predictions") == "incomplete"
    for name, value in seen.items():
        assert value == pytest.approx(alone[name], rel=1e-4), name
    assert alone["held-out accuracy"] > 0.85


def test_the_table_has_a_column_for_each_and_shows_what_is_lost_with_stock():
    result = run_script(REPOSITORY / "examples/tour.py", "--strategy", "ddp_fork_ext", env=EXAMPLE_ENVIRONMENT)
    assert result.returncode == 0, result.stdout
    table = [line.replace("┃", "│").split("│") for line in result.stdout.splitlines()]
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in table if len(cells) > 2}
    assert rows["after fit, test and predict"] == ["one device", "ddp_fork", "ddp_fork_ext"]
    assert rows["Adam's steps"] == ["132", "lost", "132"]
    assert rows["predictions in the script"] == ["360", "0", "360"]
