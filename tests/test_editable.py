"""Editable installs use the checkout; after the checkout is removed, `import torch` still works."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ranks, virtual_environments
from tests.support.virtual_environments import Environment, copy_checkout

pytestmark = pytest.mark.processes

REGISTERED = """
import json, torch
from lightning.pytorch.strategies import StrategyRegistry
print(json.dumps("ddp_ext" in StrategyRegistry))
"""


def build_editable(directory: Path, checkout: Path) -> Path:
    """Builds the wheel that pip installs with ``--editable``; returns its path."""
    build = f"from hatchling.build import build_editable; build_editable({str(directory)!r})"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=checkout, capture_output=True, text=True, timeout=ranks.LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = directory.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provides a copy of this checkout, with the files that an installation needs."""
    directory = tmp_path_factory.mktemp("user") / "checkout"
    copy_checkout(directory)
    return directory


@pytest.fixture(scope="module")
def environment(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Provides an environment with an editable install of the checkout."""
    directory = tmp_path_factory.mktemp("environment")
    wheel = build_editable(tmp_path_factory.mktemp("wheel"), checkout)
    return virtual_environments.make_environment(wheel, directory)[0]


def test_the_names_are_those_of_the_checkout(environment: Environment, checkout: Path):
    report = environment.report("import json, lightning_strategies_ext as ext; print(json.dumps(ext.__file__))")
    assert report.value == str(checkout / "lightning_strategies_ext" / "__init__.py")
    assert environment.report(REGISTERED).value is True


def test_torch_can_be_imported_after_the_checkout_was_moved(environment: Environment, checkout: Path):
    checkout.rename(checkout.with_name("elsewhere"))
    report = environment.report(REGISTERED)
    assert report.value is False
    (line,) = report.messages
    assert "No module named 'lightning_strategies_ext'" in line
    assert "Reinstall it" in line
