""":mod:`lightning_strategies_ext.discovery`: an installation registers the strategies, without side effects.

Scripts do not import the package, except in tests of the import. The scripts run in three environments: the environment
of the tests (usually an editable install), an environment with the project's wheel, and an environment with further
packages with strategies, some of them broken.
"""

import json
import re
import sys
from pathlib import Path

import pytest

from lightning_strategies_ext.registry import STRATEGIES
from tests.support.examples import EXAMPLE_ENVIRONMENT
from tests.support.ranks import REPOSITORY
from tests.support.virtual_environments import PACKAGE, Environment, Report, make_environment, table
from tests.test_doctor import findings_of

#: The module that torch calls, next to the package.
AUTOLOAD = f"{PACKAGE}_autoload"
AUTOLOAD_OFF = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


@pytest.fixture(scope="session")
def this_install(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(Path(sys.executable), tmp_path_factory.mktemp("editable"))


def install_package(
    site: Path, name: str, pytorch: dict[str, str], fabric: dict[str, str] | None = None, source: str | None = None
) -> None:
    """Installs a package with one module (none if ``source`` is None), and with entry points."""
    dist_info = site / f"{name}-1.0.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for front_end, strategies in (("pytorch", pytorch), ("fabric", fabric or {})):
        lines += [f"[lightning.{front_end}.strategies]", *(f"{key} = {value}" for key, value in strategies.items())]
    (dist_info / "entry_points.txt").write_text("\n".join(lines))
    if source is not None:
        (site / f"{name}.py").write_text(source)


@pytest.fixture(scope="session")
def third_parties(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Provides an environment with a valid package among broken packages, in any order of the metadata."""
    environment, site = make_environment(wheel, tmp_path_factory.mktemp("third_parties"))
    good = """
from lightning.fabric.strategies import SingleDeviceStrategy as FabricSingleDeviceStrategy
from lightning.pytorch.strategies import SingleDeviceStrategy
class Good(SingleDeviceStrategy): pass
class GoodFabric(FabricSingleDeviceStrategy): pass
"""
    names = {"good_one": "good_strategies:Good", "Good_Two": "good_strategies:Good"}
    install_package(site, "good_strategies", names, {"good_one": "good_strategies:GoodFabric"}, source=good)
    install_package(site, "absent_module", {"absent_one": "module_that_is_not_there:Strategy"})
    install_package(
        site, "raises_at_import", {"raising_one": "raises_at_import:S"}, source="raise OSError('[/lib] gone')"
    )
    install_package(site, "name_thief", {"ddp": "name_thief:Thief"}, source="class Thief: pass")
    return environment


# --- the name is enough ---

CONSTRUCT = """
import json, sys
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
trainer = Trainer(strategy="ddp_ext", accelerator="cpu", devices=1, logger=False)
fabric = Fabric(strategy="ddp_ext", accelerator="cpu", devices=1)
print(json.dumps({
    "package": sys.modules["lightning_strategies_ext"].__file__,
    "Trainer": [type(trainer.strategy).__module__, isinstance(trainer.strategy, DDPStrategy)],
    "Fabric": [type(fabric.strategy).__module__, isinstance(fabric.strategy, FabricDDPStrategy)],
}))
"""


@pytest.mark.processes
@pytest.mark.parametrize("install", ["wheel_install", "this_install"])
def test_the_name_selects_the_strategy_without_an_import_in_the_script(
    install: str, request: pytest.FixtureRequest
) -> None:
    environment: Environment = request.getfixturevalue(install)
    report = environment.report(CONSTRUCT)
    is_from_wheel = environment.python.parents[1] in Path(report.value["package"]).parents
    assert is_from_wheel == (install == "wheel_install")
    assert report.value["Trainer"] == ["lightning_strategies_ext.pytorch.ddp", True]
    assert report.value["Fabric"] == ["lightning_strategies_ext.fabric.ddp", True]
    assert report.messages == []


@pytest.mark.processes
def test_the_wheel_trains_on_two_processes(wheel: Path, tmp_path: Path) -> None:
    environment, _ = make_environment(wheel, tmp_path, without=())
    result = environment.run(REPOSITORY / "examples" / "digits.py", "--epochs", "1", env=EXAMPLE_ENVIRONMENT)
    assert result.returncode == 0, result.stdout + result.stderr
    cells = {row[0]: row[1] for row in table(result.stdout) if len(row) == 2}
    assert (cells["strategy"], cells["processes"]) == ("ddp_ext", "2")


CLI = """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
cli = LightningCLI(BoringModel, BoringDataModule)
print(type(cli.trainer.strategy).__module__, cli.trainer.global_step)
"""


@pytest.mark.processes
def test_the_name_works_on_the_command_line_of_lightning_cli(wheel_install: Environment) -> None:
    options = "strategy=ddp_ext accelerator=cpu devices=1 max_steps=2 logger=false enable_progress_bar=false"
    result = wheel_install.run("-c", CLI, "fit", *(f"--trainer.{option}" for option in options.split()))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "lightning_strategies_ext.pytorch.ddp 2"


# --- disabled, and enabled by an import ---

IMPORT_AFTER_LIGHTNING = """
import json
import lightning.fabric.strategies, lightning.pytorch.strategies
from lightning.pytorch import Trainer

def attempt():
    try:
        return type(Trainer(strategy="ddp_ext", accelerator="cpu", devices=1, logger=False).strategy).__module__
    except ValueError as error:
        return str(error)

def registered():
    return [list(lightning.pytorch.strategies.StrategyRegistry), list(lightning.fabric.strategies.STRATEGY_REGISTRY)]

before = attempt()
import lightning_strategies_ext
after, once = attempt(), registered()
for _ in range(2):
    lightning_strategies_ext.discovery.install()
    lightning_strategies_ext.discovery.fill_registry(lightning.pytorch.strategies)
    lightning_strategies_ext.discovery.fill_registry(lightning.fabric.strategies)
print(json.dumps([before, after, registered() == once]))
"""


@pytest.mark.processes
def test_with_autoload_off_an_import_registers_the_names_and_a_second_is_a_no_op(
    wheel_install: Environment,
) -> None:
    report = wheel_install.report(IMPORT_AFTER_LIGHTNING, env=AUTOLOAD_OFF)
    before, after, is_unchanged = report.value
    assert "invalid strategy name" in before
    assert after == "lightning_strategies_ext.pytorch.ddp"
    assert is_unchanged
    assert report.messages == []


@pytest.mark.processes
def test_with_autoload_off_the_package_may_be_imported_first(wheel_install: Environment) -> None:
    report = wheel_install.report(f"import lightning_strategies_ext\n{CONSTRUCT}", env=AUTOLOAD_OFF)
    assert report.value["Trainer"] == ["lightning_strategies_ext.pytorch.ddp", True]
    assert report.value["Fabric"] == ["lightning_strategies_ext.fabric.ddp", True]


# --- no overhead ---

KNOWS_SHM = "'shm' in torch.distributed.Backend.backend_list"
MODULES_AFTER = "import json, sys, {}; print(json.dumps(sorted(sys.modules)))"


@pytest.mark.processes
def test_import_torch_loads_the_hook_and_nothing_else(wheel_install: Environment) -> None:
    script = f"import json, sys, torch; print(json.dumps([sorted(sys.modules), {KNOWS_SHM}]))"
    modules_with_hook, knows_with_hook = wheel_install.report(script).value
    modules_without_hook, knows_without_hook = wheel_install.report(script, env=AUTOLOAD_OFF).value
    assert (knows_with_hook, knows_without_hook) == (True, False)
    with_hook = set(modules_with_hook)
    added = with_hook - set(modules_without_hook)
    assert f"{PACKAGE}.discovery" in added
    assert {name.partition(".")[0] for name in added} - sys.stdlib_module_names <= {PACKAGE, AUTOLOAD, "wrapt"}
    assert {name for name in added if name.startswith(PACKAGE)} == {
        PACKAGE,
        AUTOLOAD,
        *(f"{PACKAGE}.{name}" for name in ("discovery", "shm")),
    }
    assert not with_hook & {"lightning", "horovod"}


@pytest.mark.processes
@pytest.mark.parametrize("env", [{}, AUTOLOAD_OFF], ids=["autoload", "no autoload"])
def test_torch_knows_the_backend_shm_after_an_import_of_the_package(
    wheel_install: Environment, env: dict[str, str]
) -> None:
    script = f"import json, lightning_strategies_ext, torch; print(json.dumps({KNOWS_SHM}))"
    assert wheel_install.report(script, env=env).value is True


@pytest.mark.processes
def test_import_lightning_loads_no_strategy_module_and_prints_no_warning(wheel_install: Environment) -> None:
    script = MODULES_AFTER.format("torch, lightning")
    warnings_are_errors = ("-W", "error")
    result = wheel_install.run(*warnings_are_errors, "-c", script)
    if result.returncode and wheel_install.run(*warnings_are_errors, "-c", script, env=AUTOLOAD_OFF).returncode:
        pytest.skip("`python -W error -c 'import lightning'` fails here without this package already")
    assert result.returncode == 0, result.stderr
    imported = {name for name in json.loads(result.stdout) if name.startswith(PACKAGE)}
    modules = ("discovery", "lightning_names", "registry", "shm")
    assert imported == {PACKAGE, AUTOLOAD, *(f"{PACKAGE}.{name}" for name in modules)}


def write_stub_of_lightning(directory: Path, registries: dict[str, str]) -> dict[str, str]:
    """Writes a package ``lightning`` whose two halves do not import each other, unlike the real package.

    Returns:
        The environment variables with which the stub shadows the real package.
    """
    for half, registry_name in registries.items():
        strategies = directory / "lightning" / half / "strategies.py"
        strategies.parent.mkdir(parents=True)
        (strategies.parents[1] / "__init__.py").touch()
        strategies.write_text(
            "class Registry(dict):\n"
            "    def register(self, name, strategy, **about): self[name] = dict(about, strategy=strategy)\n"
            f"{registry_name} = Registry()\n"
        )
    return {"PYTHONPATH": str(directory)}


@pytest.mark.processes
@pytest.mark.parametrize(("half", "other"), [("fabric", "pytorch"), ("pytorch", "fabric")])
def test_filling_one_registry_does_not_import_the_other_half_of_lightning(
    wheel_install: Environment, tmp_path: Path, half: str, other: str
) -> None:
    registries = {"fabric": "STRATEGY_REGISTRY", "pytorch": "StrategyRegistry"}
    env = write_stub_of_lightning(tmp_path, registries)
    script = f"""
import json, sys, lightning_strategies_ext
from lightning.{half}.strategies import {registries[half]} as registry
print(json.dumps(["ddp_ext" in registry, [name for name in sys.modules if name.startswith("lightning.{other}")]]))
"""
    assert wheel_install.report(script, env=env).value == [True, []]


# --- broken environments ---


@pytest.mark.processes
def test_a_broken_hook_does_not_break_import_torch(wheel_install: Environment, tmp_path: Path) -> None:
    (tmp_path / "wrapt.py").write_text("raise OSError('no such library')")
    report = wheel_install.report("import torch; print(len(torch.ones(3)))", env={"PYTHONPATH": str(tmp_path)})
    assert report.value == 3
    assert len(report.messages) == 1
    assert "could not be registered (OSError: no such library)" in report.messages[0]


@pytest.mark.processes
def test_a_lightning_with_other_registries_can_still_be_imported(wheel_install: Environment, tmp_path: Path) -> None:
    env = write_stub_of_lightning(tmp_path, {"fabric": "renamed", "pytorch": "renamed"})
    script = "import lightning_strategies_ext, lightning.pytorch.strategies, lightning.fabric.strategies; print(1)"
    report = wheel_install.report(script, env=env)
    assert [re.search("`(.*?)`", line)[1] for line in report.messages] == [
        "lightning.pytorch.strategies",
        "lightning.fabric.strategies",
    ]


@pytest.mark.processes
def test_a_lightning_that_it_was_not_made_for_is_named(wheel_install: Environment, tmp_path: Path) -> None:
    env = write_stub_of_lightning(tmp_path, {"pytorch": "StrategyRegistry", "fabric": "STRATEGY_REGISTRY"})
    (tmp_path / "lightning" / "__init__.py").write_text('__version__ = "2.4.1"')
    script = "import lightning_strategies_ext, lightning.pytorch.strategies, lightning.fabric.strategies; print(1)"
    report = wheel_install.report(script, env=env)
    (message,) = report.messages  # one message for both registries
    assert "supports Lightning 2.5 and 2.6, but lightning 2.4.1 is installed" in message


# --- strategies of other packages ---

USE_THIRD_PARTIES = """
import json
import lightning.pytorch.strategies
from lightning.fabric import Fabric
from lightning.pytorch import Trainer

def attempt(front_end, name):
    try:
        strategy = front_end(strategy=name, accelerator="cpu", devices=1).strategy
        return f"{type(strategy).__module__}.{type(strategy).__qualname__}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"

names = ["good_one", "Good_Two", "ddp_ext", "ddp", "absent_one", "raising_one"]
print(json.dumps({"Trainer": {name: attempt(Trainer, name) for name in names}, "Fabric": attempt(Fabric, "good_one")}))
"""


@pytest.fixture(scope="session")
def third_party_report(third_parties: Environment) -> Report:
    return third_parties.report(USE_THIRD_PARTIES)


@pytest.mark.processes
def test_another_package_adds_a_strategy_through_the_entry_points(third_party_report: Report) -> None:
    assert third_party_report.value["Trainer"]["good_one"] == "good_strategies.Good"
    assert third_party_report.value["Fabric"] == "good_strategies.GoodFabric"


@pytest.mark.processes
def test_a_name_with_capitals_is_found_although_lightning_lowers_what_it_is_given(third_party_report: Report) -> None:
    assert third_party_report.value["Trainer"]["Good_Two"] == "good_strategies.Good"


@pytest.mark.processes
def test_broken_packages_do_not_affect_the_other_names(third_party_report: Report) -> None:
    assert third_party_report.value["Trainer"]["ddp_ext"] == "lightning_strategies_ext.pytorch.ddp.DDPStrategy"


@pytest.mark.processes
def test_a_package_cannot_take_a_name_of_lightnings(third_party_report: Report) -> None:
    assert third_party_report.value["Trainer"]["ddp"] == "lightning.pytorch.strategies.ddp.DDPStrategy"


@pytest.mark.processes
def test_one_line_names_each_entry_point_that_cannot_be_registered_and_its_package(
    third_party_report: Report,
) -> None:
    absent, conflicting = sorted(third_party_report.messages)
    assert "'absent_one'" in absent
    assert "package absent_module is not available: the module 'module_that_is_not_there' is not installed" in absent
    assert "'ddp'" in conflicting
    assert "package name_thief is not available: the name is already taken" in conflicting
    assert "invalid strategy name" in third_party_report.value["Trainer"]["absent_one"]


@pytest.mark.processes
def test_a_module_that_raises_breaks_only_the_script_that_asks_for_it(third_party_report: Report) -> None:
    message = third_party_report.value["Trainer"]["raising_one"]
    assert message.startswith("ImportError")
    assert "package raises_at_import cannot be loaded (OSError: [/lib] gone)" in message


@pytest.mark.processes
def test_registering_again_prints_no_further_notice_about_other_packages(
    third_parties: Environment, tmp_path: Path
) -> None:
    env = write_stub_of_lightning(tmp_path, {"pytorch": "StrategyRegistry"})
    script = """
import json, lightning.pytorch.strategies as strategies
from lightning_strategies_ext import discovery
discovery.fill_registry(strategies)
print(json.dumps(sorted(strategies.StrategyRegistry)))
"""
    report = third_parties.report(script, env=env)
    assert "good_one" in report.value
    assert not [line for line in report.messages if "good_strategies" in line]


@pytest.mark.processes
def test_the_doctor_reports_which_strategy_cannot_run_and_why(third_parties: Environment) -> None:
    _, shown = findings_of(third_parties, "doctor", returncode=1)
    assert "package raises_at_import cannot be loaded (OSError: [/lib] gone)" in shown["raising_one"]["problem"]
    assert shown["raising_one"]["is_error"]
    assert shown["good_one"]["problem"] is None
    assert all(
        shown[strategy.name]["problem"] is None
        for strategy in STRATEGIES
        if not re.search("elastic|ray", strategy.name)
    )
