"""Skips the tests of this directory, with a reason, on hosts without a GPU."""

from pathlib import Path

import pytest
import torch

from tests.gpu.devices import ON_CPU, Ranks, two_ranks_skip_reason


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ON_CPU or torch.cuda.is_available():
        return
    needs_gpu = pytest.mark.skip(reason="needs a GPU: torch.cuda.is_available() is False")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(needs_gpu, append=False)


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Provides one rank, and two ranks if NCCL supports them on this host."""
    return request.getfixturevalue("two_ranks") if request.param == 2 else Ranks(1)


@pytest.fixture(scope="session")
def two_ranks() -> Ranks:
    if reason := two_ranks_skip_reason():
        pytest.skip(reason)
    return Ranks(2)
