"""``examples/gan.py``: a GAN with two optimizers on two ranks generates digits that a classifier recognizes."""

from pathlib import Path

import pytest

from tests.support.examples import assert_shows_something, number, run_example

pytestmark = pytest.mark.processes

BEFORE, AFTER, REAL = range(3)


def test_the_gan_learns_to_draw_the_requested_digit(tmp_path: Path) -> None:
    output = run_example("gan.py", "--epochs", "15", "--plot", "drawn.png", directory=tmp_path)
    read = [number(output, "classified as requested", column) for column in (BEFORE, AFTER, REAL)]
    assert read[BEFORE] < 0.3
    assert read[AFTER] > 0.6
    assert read[REAL] > 0.95
    distance = [number(output, "Fréchet distance to real ones", column) for column in (BEFORE, AFTER, REAL)]
    assert distance[REAL] < distance[AFTER] < distance[BEFORE] / 2
    assert_shows_something(tmp_path / "drawn.png")
