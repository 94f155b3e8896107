"""Fabric examples of the documentation run unchanged, with the same results as with Lightning's strategies."""

import re
from typing import Any

import pytest
import torch

from tests.support.horovod_ranks import run_horovod
from tests.support.models import assert_same_bits, state_of
from tests.support.ranks import REPOSITORY, run_ranks

pytestmark = pytest.mark.processes


def example_of(page: str) -> str:
    """Returns the Python code of the page's section about Fabric."""
    section = (REPOSITORY / "docs" / page).read_text().split("\n## Under Fabric\n")[1].split("\n## ")[0]
    (example,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return example


def run_example(page: str, strategy: str | None = None) -> dict[str, torch.Tensor]:
    """Runs the example, with its strategy or with one of Lightning's; returns the weights."""
    example, devices = example_of(page), 1 if strategy == "auto" else 2
    if strategy is not None:
        example, count = re.subn(r"strategy=.*\), accelerator", f'strategy="{strategy}", accelerator', example)
        assert count == 1
        example = example.replace("devices=2", f"devices={devices}")
    namespace: dict[str, Any] = {}
    exec(example, namespace)
    assert namespace["fabric"].strategy.__module__.startswith("lightning_strategies_ext.") == (strategy is None)
    return state_of(namespace["net"])


def test_the_example_for_ddp_gives_the_weights_of_stock():
    expected = run_ranks(run_example, "ddp.md", "ddp")
    for ext, stock in zip(run_ranks(run_example, "ddp.md"), expected, strict=True):
        assert_same_bits(ext, stock)


def test_the_example_for_dp_gives_the_weights_of_a_single_device():
    (ext,) = run_ranks(run_example, "dp.md", world_size=1)
    (stock,) = run_ranks(run_example, "dp.md", "auto", world_size=1)
    for name, tensor in ext.items():
        torch.testing.assert_close(tensor, stock[name])


def test_the_example_for_horovod_gives_the_weights_of_stock_to_half_precision():
    (expected, _), ranks = run_ranks(run_example, "horovod.md", "ddp"), run_horovod("python", run_example, "horovod.md")
    for ext in ranks:
        for name, tensor in ext.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-2, atol=1e-2)
