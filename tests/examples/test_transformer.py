"""``examples/transformer.py``: bits per byte fall below the entropy of byte frequencies, and the model writes text."""

from pathlib import Path

import pytest

from tests.support.examples import assert_shows_something, number, run_example

pytestmark = pytest.mark.processes

SMALL = ("--epochs", "2", "--width", "32", "--layers", "1", "--context", "64", "--fraction", "0.25")


def test_the_transformer_learns_and_generates_text(tmp_path: Path) -> None:
    output = run_example("transformer.py", *SMALL, "--plot", "bits.png", directory=tmp_path)
    for column in (0, 1):
        assert number(output, "2", column) < number(output, "1", column)
    assert number(output, "2", 1) < number(output, "byte frequencies", 1) - 0.5
    assert number(output, "2", 2) > 0
    _, written = output.split("Generated text")
    lines = [line for line in written.splitlines()[1:] if not line.startswith("───")]
    assert lines[0].startswith("Return the ")
    assert len(" ".join(lines)) > 300
    assert_shows_something(tmp_path / "bits.png")
