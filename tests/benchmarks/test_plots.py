"""Plots of benchmarks: what is drawn from the JSON files in the repository, without matplotlib."""

from pathlib import Path

import pytest

from benchmarks import plots
from benchmarks.drawing import STYLES, Curves, Panel

RESULTS = Path(plots.__file__).parent / "results"


@pytest.fixture
def drawn(monkeypatch):
    """Draws nothing; returns the plots that each file would have, by its name."""
    figures = {}

    def draw(directory, name, title, parts):
        figures[name] = parts
        return directory / f"{name}.png"

    monkeypatch.setattr(plots, "draw", draw)
    monkeypatch.setattr(plots, "draw_curves", draw)
    for file in RESULTS.glob("*.json"):
        plots.draw_plot(file)
    return figures


def names_of_contenders(part: Panel | Curves) -> set[str]:
    if isinstance(part, Panel) and part.are_rows_contenders:
        return set(part.labels)
    return {name for series in part.series for name in series.split("/")}


def test_each_picture_of_the_results_is_drawn_from_a_json_file(drawn):
    assert sorted(drawn) == sorted(file.stem for file in RESULTS.glob("*.png"))


def test_each_contender_has_a_color_of_its_own(drawn):
    names = {name for parts in drawn.values() for part in parts for name in names_of_contenders(part)}
    assert {"ddp", "ddp_ext", "horovod_ext"} < names
    assert sorted(names - set(STYLES) - {"median, quartiles"}) == []
    strategies = [name for name in names if name in ("ddp", "ddp_spawn") or name.endswith("_ext")]
    assert len({STYLES[name].color for name in strategies}) == len(strategies)


def test_each_series_has_a_value_for_each_row(drawn):
    for parts in drawn.values():
        for part in parts:
            positions = part.labels if isinstance(part, Panel) else part.x
            assert positions
            assert {len(spreads) for spreads in part.series.values()} == {len(positions)}


def test_a_file_with_another_name_is_drawn_as_the_given_kind(drawn, tmp_path):
    renamed = tmp_path / "slow.json"
    renamed.write_text((RESULTS / "hosts_4.json").read_text())
    assert plots.draw_plot(renamed) is None
    assert plots.draw_plot(renamed, kind="hosts") == tmp_path / "slow.png"
    assert [panel.labels for panel in drawn["slow"]] == [panel.labels for panel in drawn["hosts_4"]]
