"""Processes of this package have the module path of the main process, without the working directory."""

import os
import sys
from pathlib import Path

import pytest

from lightning_strategies_ext._system.interpreters import module_path, python, python_module
from lightning_strategies_ext.horovod_build import source
from tests.support.ranks import REPOSITORY, run_script
from tests.support.ray_clusters import needs_ray

#: Modules that Python, processes of this package, pip, and Ray import early. The parent processes find them elsewhere.
PLANTED_MODULES = (
    *("json", "multiprocessing", "pip", "socket", "struct", "logging", "pickle", "runpy", "sitecustomize", "psutil"),
    *("numpy", "torch", "lightning", "torchmetrics", "lightning_strategies_ext", "cloudpickle", "typing_extensions"),
)
SCRIPT = """
import sys
from lightning.pytorch import Trainer
from tests.support.models import MLP, loader
from lightning_strategies_ext import DDPSpawnStrategy

if __name__ == "__main__":
    for name in sys.argv[1:]:
        strategy = DDPSpawnStrategy(start_method="forkserver") if name == "forkserver" else name
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=2, max_epochs=1, **quiet)
        context = "spawn" if name == "ddp_spawn_ext" else "fork"
        trainer.fit(MLP(), loader(num_workers=1, multiprocessing_context=context))
"""


@pytest.fixture
def planted_modules(tmp_path: Path) -> Path:
    """Creates a directory with modules that write to a file when they are imported."""
    directory = tmp_path / "working"
    directory.mkdir()
    for name in PLANTED_MODULES:
        text = f"open({str(tmp_path / 'imported')!r}, 'a').write({name + ' '!r})\nraise ImportError('planted')\n"
        (directory / f"{name}.py").write_text(text)
    return directory


def assert_none_was_imported(planted_modules: Path) -> None:
    imported = planted_modules.parent / "imported"
    assert not imported.exists(), imported.read_text()


LAUNCHED = [
    ["ddp_spawn_ext", "forkserver", "ddp_spawn_elastic_ext"],
    ["ddp_ext"],
    ["horovod_ext"],
    pytest.param(["ddp_ray_ext"], marks=needs_ray),
]


@pytest.mark.processes
@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 has no -P: interpreters of multiprocessing search it"
)
@pytest.mark.parametrize("names", LAUNCHED, ids=lambda names: names[0])
def test_ranks_import_nothing_from_the_working_directory(planted_modules: Path, names: list[str]) -> None:
    script = planted_modules.parent / "train.py"
    script.write_text(SCRIPT)
    run = run_script(str(script), *names, cwd=planted_modules, env={"PYTHONPATH": str(REPOSITORY)})
    assert_none_was_imported(planted_modules)
    assert run.returncode == 0, run.output


@pytest.mark.processes
def test_the_descriptor_store_imports_nothing_from_the_working_directory(planted_modules: Path) -> None:
    script = planted_modules.parent / "train.py"
    script.write_text(SCRIPT)
    torchrun = "import sys; sys.path.remove(''); from torch.distributed.run import main; main()"
    command = ["-c", torchrun, "--standalone", "--nproc-per-node=2", str(script), "ddp_elastic_ext"]
    run = run_script(*command, cwd=planted_modules, env={"PYTHONPATH": str(REPOSITORY)})
    assert_none_was_imported(planted_modules)
    assert run.returncode == 0, run.output


@pytest.mark.processes
def test_pip_imports_nothing_from_the_working_directory(planted_modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(planted_modules)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(source.SourceError, match="could not download the source of horovod"):
        source.fetch_source(planted_modules.parent)
    assert_none_was_imported(planted_modules)


@pytest.mark.processes
def test_the_command_of_this_package_imports_nothing_from_the_working_directory(planted_modules: Path) -> None:
    for name in PLANTED_MODULES:
        if name not in ("json", "multiprocessing", "pip"):  # `python -m` imports the other modules before this package
            (planted_modules / f"{name}.py").unlink()
    assert "works" in run_script("-m", "lightning_strategies_ext", cwd=planted_modules).stdout
    assert_none_was_imported(planted_modules)


@pytest.mark.processes
def test_the_command_imports_only_its_package_from_below_the_working_directory(planted_modules: Path) -> None:
    """The working directory may have a virtual environment with this package."""
    for name in PLANTED_MODULES:
        if name not in ("json", "multiprocessing", "pip"):
            (planted_modules / f"{name}.py").unlink()
    (planted_modules / "site").mkdir()
    (planted_modules / "site" / "lightning_strategies_ext").symlink_to(REPOSITORY / "lightning_strategies_ext")
    run = run_script(
        "-m", "lightning_strategies_ext", cwd=planted_modules, env={"PYTHONPATH": str(planted_modules / "site")}
    )
    assert "works" in run.stdout
    assert_none_was_imported(planted_modules)


def test_relative_directories_are_below_the_initial_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    initial = os.getcwd()
    monkeypatch.setattr(sys, "path", ["", "src", "/usr/lib"])
    monkeypatch.chdir("/")
    assert module_path() == [initial, os.path.join(initial, "src"), "/usr/lib"]
    assert f"; sys.path[:] = {module_path()!r}; pass" in python("pass")[-1]
    assert python_module("pip", "list")[-1] == "list"
