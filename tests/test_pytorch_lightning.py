"""``pytorch_lightning`` has the same strategies, in modules that are generated from those for ``lightning``."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import hatch_build
from lightning_strategies_ext import lightning_names
from tests.support import mirrored_repository, virtual_environments
from tests.support.ranks import REPOSITORY, run_script

#: Tests that also run with the other name of Lightning; ``make matrix CORNERS=other_name ALL=1`` runs all tests.
RUN_AGAIN = [
    "tests/pytorch/test_ddp.py",
    "tests/pytorch/test_command_line.py",
    "tests/fabric/test_front_ends.py",
    "tests/lightning_private",
]
#: Tests of each registered name, which start many processes. The same code registers the names in both packages.
NOT_AGAIN = "not every_fork_name and not every_popen_name and not that_is_an_option_reaches"


def run(script: str, directory: Path, *arguments: str) -> list[Any]:
    """Returns the JSON in the last line of a script's output."""
    pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    file = directory / "script.py"
    file.write_text(script)
    result = run_script(file, *arguments)
    assert result.returncode == 0, result.stdout
    return json.loads(result.stdout.splitlines()[-1])


def test_the_modules_for_the_other_name_are_those_that_their_sources_make():
    directory = REPOSITORY / lightning_names.MIRROR.replace(".", "/")
    found = {path.relative_to(directory): path.read_text() for path in directory.rglob("*.py")}
    expected = hatch_build.mirrored_sources(REPOSITORY)
    assert found.keys() == expected.keys(), "run `python hatch_build.py`"
    assert [str(path) for path in expected if expected[path] != found[path]] == [], "run `python hatch_build.py`"


def test_no_generated_module_names_lightning():
    modules = hatch_build.modules_of(REPOSITORY)
    for path, text in hatch_build.mirrored_sources(REPOSITORY).items():
        imported = hatch_build.imported_by(text, modules)
        assert not {name for name in imported if name.split(".")[0] == "lightning"}, path


@pytest.mark.processes
@pytest.mark.timeout(900)
def test_tests_pass_with_the_other_name_in_them(tmp_path):
    pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    mirrored_repository.write(tmp_path)
    mirrored_pytest = ("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", NOT_AGAIN, *RUN_AGAIN)
    environment = {"PYTHONPATH": str(tmp_path)}
    result = run_script(*mirrored_pytest, cwd=tmp_path, env=environment, timeout_s=800)
    assert result.returncode == 0, result.stdout


BOTH = """
import json

import lightning.pytorch as one
import pytorch_lightning as other
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_strategies_ext
from lightning_strategies_ext import pytorch_lightning as for_other


def model_of(pl):
    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.net = torch.nn.Linear(8, 3)

        def training_step(self, batch, batch_idx):
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Model()


def make_trainer(pl, strategy):
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)


def main():
    torch.manual_seed(1)
    data = DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(3, (64,))), batch_size=8)
    seen = []
    for name in ("ddp_fork_ext", "dp_ext"):
        weights = []
        for pl in (one, other):
            model = model_of(pl)
            make_trainer(pl, name).fit(model, data)
            weights.append(model.net.weight)
        seen.append(torch.equal(*weights))
    for pl, package in ((other, lightning_strategies_ext), (one, for_other)):
        try:
            make_trainer(pl, package.DDPSpawnStrategy())
        except ValueError as error:
            seen.append(str(error))
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
"""


@pytest.mark.processes
def test_both_packages_train_alike_in_one_process_and_refuse_each_others_strategies(tmp_path):
    *are_equal, first, second = run(BOTH, tmp_path)
    assert are_equal == [True, True]
    line = "For the Trainer of `{}`: from {} import DDPSpawnStrategy; DDPSpawnStrategy(start_method='forkserver')"
    assert line.format("pytorch_lightning", lightning_names.MIRROR) in first
    assert line.format("lightning", lightning_names.PACKAGE) in second


@pytest.fixture(scope="module")
def without_lightning(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> virtual_environments.Environment:
    """Provides an environment with ``pytorch_lightning`` only."""
    pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    directory = tmp_path_factory.mktemp("without_lightning")
    return virtual_environments.make_environment(wheel, directory, without=("lightning", "lightning-*"))[0]


FIT = """
import json
import sys

import pytorch_lightning as pl
import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    data = DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(3, (64,))), batch_size=8)
    seen = []
    for name in ("dp_ext", "ddp_spawn_ext"):
        trainer = pl.Trainer(strategy=name, accelerator="cpu", devices=2, max_epochs=1, logger=False,
                             enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(Model(), data)
        seen.append([trainer.global_step, isinstance(trainer.strategy, pl.strategies.ParallelStrategy)])
    from lightning_strategies_ext import DDPStrategy, KeepGlobalBatch
    from lightning_strategies_ext.fabric import DDPStrategy as FabricDDPStrategy
    fabric = Fabric(strategy=FabricDDPStrategy(start_method="fork"), accelerator="cpu", devices=2)
    seen.append([issubclass(DDPStrategy, pl.strategies.DDPStrategy), issubclass(KeepGlobalBatch, pl.Callback)])
    seen.append(fabric.launch(lambda fabric: fabric.all_reduce(torch.ones(())).item()))
    seen.append([name for name in sys.modules if name.split(".")[0] == "lightning"])
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
"""


ORDER = """
import json
import sys

{}

try:
    pl.Trainer(strategy=DDPStrategy(), accelerator="cpu", devices=1, logger=False)
except ValueError as error:
    print(json.dumps([DDPStrategy.__module__, str(error)]))
else:
    print(json.dumps([DDPStrategy.__module__, ""]))
"""
EXT = "from lightning_strategies_ext import DDPStrategy"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("imports", "module", "advice"),
    [
        (["import pytorch_lightning as pl", EXT], f"{lightning_names.MIRROR}.pytorch.ddp", ""),
        (["import lightning.pytorch as pl", EXT], "lightning_strategies_ext.pytorch.ddp", ""),
        ([EXT, "import lightning.pytorch as pl"], "lightning_strategies_ext.pytorch.ddp", ""),
        (
            [EXT, "import pytorch_lightning as pl"],
            "lightning_strategies_ext.pytorch.ddp",
            f"For the Trainer of `pytorch_lightning`: from {lightning_names.MIRROR} import DDPStrategy",
        ),
    ],
    ids=["pytorch_lightning first", "lightning first", "lightning last", "pytorch_lightning last"],
)
def test_strategies_are_for_the_imported_name_or_else_for_lightning(tmp_path, imports, module, advice):
    found, message = run(ORDER.format("\n".join(imports)), tmp_path)
    assert found == module
    assert advice in message
    assert bool(advice) == bool(message)


@pytest.mark.processes
def test_other_packages_register_strategies_for_the_other_name(wheel, tmp_path):
    pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    environment, site = virtual_environments.make_environment(wheel, tmp_path)
    about = site / "other-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    groups = [
        f"[{module}.strategies]\nothers = other:Strategy\n" for module in ("pytorch_lightning", "lightning_fabric")
    ]
    (about / "entry_points.txt").write_text("".join(groups))
    (site / "other.py").touch()
    script = """
import json
import lightning_fabric.strategies as fabric, pytorch_lightning.strategies as pytorch
print(json.dumps(["others" in pytorch.StrategyRegistry, "others" in fabric.STRATEGY_REGISTRY]))
"""
    report = environment.report(script)
    assert report.value == [True, True]
    assert report.messages == []


CLI = """
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.demos.boring_classes import BoringDataModule, BoringModel
cli = LightningCLI(BoringModel, BoringDataModule)
print(type(cli.trainer.strategy).__module__, cli.trainer.global_step)
"""


@pytest.mark.processes
def test_without_any_lightning_the_error_names_the_package_to_install(wheel, tmp_path):
    lightning = ("lightning", "lightning-*", "lightning_fabric*", "pytorch_lightning*")
    environment, _ = virtual_environments.make_environment(wheel, tmp_path, without=lightning)
    for command in (("-m", lightning_names.PACKAGE), ("-c", "from lightning_strategies_ext import DDPStrategy")):
        result = environment.run(*command)
        assert result.returncode == 1
        assert "the package 'lightning' is not installed. Run `pip install lightning`" in result.stdout + result.stderr
    assert environment.run("-c", "from lightning_strategies_ext import ShmOptions").returncode == 0


@pytest.mark.processes
def test_the_wheel_works_without_lightning(without_lightning, tmp_path):
    assert without_lightning.run("-c", "import lightning").returncode == 1
    script = tmp_path / "script.py"
    script.write_text(FIT)
    result = without_lightning.run(script)
    assert result.stdout.splitlines()[-1:] == ["[[8, true], [4, true], [true, true], 1.0, []]"], result
    options = "strategy=ddp_ext accelerator=cpu devices=1 max_steps=2 logger=false enable_progress_bar=false"
    result = without_lightning.run("-c", CLI, "fit", *(f"--trainer.{option}" for option in options.split()))
    assert result.stdout.splitlines()[-1:] == [f"{lightning_names.MIRROR}.pytorch.ddp 2"], result
    result = without_lightning.run("-m", lightning_names.PACKAGE, "--json")
    assert result.returncode == 0, result
    found = json.loads(result.stdout)
    assert found["environment"]["Lightning"] == f"pytorch-lightning {version('pytorch-lightning')}"
    assert [each["front_ends"] for each in found["strategies"] if each["name"] == "ddp_ext"] == [["Trainer", "Fabric"]]
