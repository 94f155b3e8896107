"""Malicious releases of Lightning (GHSA-w37p-236h-pfx3) are detected from metadata, and never imported.

The fake distributions of the tests precede the real ones on the path, and record their import.
"""

import json
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lightning_strategies_ext.discovery import MALICIOUS_VERSIONS
from tests.support.ranks import REPOSITORY, clean_environment

DISTRIBUTIONS = {"lightning": ["lightning"], "pytorch-lightning": ["pytorch_lightning", "lightning_fabric"]}
#: Source of a fake module of Lightning, with the registries that a script may import.
STRATEGIES = """
class Registry(dict):
    def register(self, name, strategy, **kwargs): self[name] = strategy
StrategyRegistry = STRATEGY_REGISTRY = Registry()
"""


class Fake:
    """A fake distribution in a directory, and programs that run with the directory on their path."""

    def __init__(self, directory: Path, distribution: str, version: str) -> None:
        self.directory = directory
        self.was_imported = directory / "was-imported"
        metadata = directory / f"{distribution.replace('-', '_')}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        for package in DISTRIBUTIONS[distribution]:
            for name in (package, f"{package}/strategies", f"{package}/fabric/strategies"):
                module = directory / name / "__init__.py"
                module.parent.mkdir(parents=True, exist_ok=True)
                module.write_text(f"open({str(self.was_imported)!r}, 'w').close()\n{STRATEGIES}")

    def run(self, *command: str, **env: str) -> "subprocess.CompletedProcess[str]":
        environment = {**clean_environment(), "PYTHONPATH": f"{self.directory}:{REPOSITORY}", "COLUMNS": "400", **env}
        command = (sys.executable, *command)
        return subprocess.run(
            command, env=environment, cwd=self.directory, capture_output=True, text=True, timeout=300, check=False
        )


@pytest.fixture(params=[(name, version) for name in DISTRIBUTIONS for version in MALICIOUS_VERSIONS], ids="=".join)
def release(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


#: Releases for tests that do not depend on the version: one release of each distribution.
OF_EACH_DISTRIBUTION = [(name, max(MALICIOUS_VERSIONS)) for name in DISTRIBUTIONS]
of_each_distribution = pytest.mark.parametrize("release", OF_EACH_DISTRIBUTION, ids="=".join)


@pytest.fixture
def fake(tmp_path: Path, release: tuple[str, str]) -> Fake:
    return Fake(tmp_path, *release)


def warnings_in(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.startswith("lightning-strategies-ext:")]


@pytest.mark.processes
def test_import_of_torch_prints_one_warning_line_with_the_fix(fake, release):
    result = fake.run("-c", "import torch, lightning_strategies_ext")
    assert result.returncode == 0, result.stderr
    (line,) = warnings_in(result.stderr)
    assert f"{release[0]} {release[1]} is malware" in line
    assert f"Run `pip uninstall {release[0]}`" in line
    assert not fake.was_imported.exists()


@pytest.mark.processes
@of_each_distribution
def test_nothing_is_registered_even_where_the_script_imports_it(fake, release):
    package = DISTRIBUTIONS[release[0]][-1]
    module = "lightning.fabric.strategies" if package == "lightning" else "lightning_fabric.strategies"
    script = f"import torch, {module} as s; print(list(s.STRATEGY_REGISTRY), 'SHM' in dir(torch.distributed.Backend))"
    result = fake.run("-c", script)
    assert result.stdout.splitlines()[-1:] == ["[] False"], result.stderr
    assert len(warnings_in(result.stderr)) == 1
    assert fake.was_imported.exists()  # imported by the script, which shows that the fake records an import


@pytest.mark.processes
@pytest.mark.parametrize("statement", ["from lightning_strategies_ext import DDPStrategy",
                                       "from lightning_strategies_ext.fabric import DDPStrategy"])  # fmt: skip
def test_classes_that_need_lightning_are_refused_before_it_is_imported(fake, statement):
    result = fake.run("-c", statement)
    assert result.returncode == 1
    assert "ImportError" in result.stderr
    assert "is malware" in result.stderr.splitlines()[-1]
    assert not fake.was_imported.exists()


@pytest.mark.processes
@pytest.mark.parametrize("command", [(), ("doctor",)])
def test_the_doctor_reports_it_in_red_and_exits_with_1(fake, release, command):
    result = fake.run("-m", "lightning_strategies_ext", *command, FORCE_COLOR="1")
    assert result.returncode == 1, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if "is malware" in line]
    assert line.startswith("\x1b[1;31m")
    assert f"{release[0]} {release[1]}" in line.replace("\x1b[0m", "").replace("\x1b[1;31m", "")
    assert not fake.was_imported.exists()


@pytest.mark.processes
def test_the_doctor_reports_it_to_machines(fake, release):
    result = fake.run("-m", "lightning_strategies_ext", "--json")
    assert result.returncode == 1, result.stderr
    found = json.loads(result.stdout)
    assert found["malicious"] == {release[0]: release[1]}
    assert f"{release[0]} {release[1]}" in found["environment"]["Lightning"]
    assert found["strategies"] == []
    assert not fake.was_imported.exists()


@pytest.mark.processes
def test_a_clean_release_of_the_same_name_is_not_reported(tmp_path):
    fake = Fake(tmp_path, "lightning", "2.6.4")
    result = fake.run("-c", "import torch, lightning_strategies_ext")
    assert result.returncode == 0, result.stderr
    assert warnings_in(result.stderr) == []


def test_every_requirement_of_lightning_excludes_the_malicious_releases():
    in_noxfile = re.findall(r'"((?:pytorch-)?lightning[=!<>][^"]*)"', (REPOSITORY / "noxfile.py").read_text())
    of_matrix = [Requirement(text) for text in in_noxfile]
    of_extras = [Requirement(text) for text in requires("lightning-strategies-ext")]
    of_extras = [requirement for requirement in of_extras if requirement.name in DISTRIBUTIONS]
    assert {requirement.name for requirement in of_extras} == set(DISTRIBUTIONS)
    assert len(of_matrix) == 4  # one constant for the newest release, and three fixed versions
    for requirement in (*of_extras, *of_matrix):
        for version in MALICIOUS_VERSIONS:
            assert not requirement.specifier.contains(version), f"{requirement} admits {version}"
