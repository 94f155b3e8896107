"""Private names of Lightning that this package uses: each is used in one module, has a test, and still exists."""

import ast
from pathlib import Path

import pytest
from lightning.fabric.strategies import DataParallelStrategy as FabricDataParallelStrategy
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import ParallelStrategy as LightningParallelStrategy

from tests.support.ranks import REPOSITORY


def test_every_name_has_its_test() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    modules = (REPOSITORY / "lightning_strategies_ext/_lightning").glob("[!_]*.py")
    names = [f"{path.stem}.{name}" for path in modules for name in public_names(path)]
    assert len(names) > 50
    assert [name for name in names if name not in tests] == []


def public_names(path: Path) -> list[str]:
    """Returns the names of a module: its public functions, and the names under which it imports private names."""
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            names.append(node.name)
        elif isinstance(node, ast.ImportFrom):
            names += [alias.asname for alias in node.names if alias.asname and alias.name.startswith("_")]
    return names


OVERRIDDEN = [
    (LightningDDPStrategy, "_configure_launcher"),
    (LightningDDPStrategy, "_setup_model"),
    (FabricDDPStrategy, "_configure_launcher"),
    (FabricDDPStrategy, "_setup_distributed"),
    (FabricDDPStrategy, "_set_world_ranks"),
    (FabricDataParallelStrategy, "_configure_launcher"),
    (LightningParallelStrategy, "__getstate__"),
    (LightningParallelStrategy, "_configure_launcher"),
    (LightningParallelStrategy, "_setup_model"),
]


@pytest.mark.parametrize(("owner", "name"), OVERRIDDEN, ids=lambda value: getattr(value, "__module__", value))
def test_each_overridden_or_called_method_exists_in_lightning(owner: type, name: str) -> None:
    assert callable(getattr(owner, name, None))


def test_no_other_module_imports_a_private_name_of_lightning() -> None:
    package = REPOSITORY / "lightning_strategies_ext"
    found = {
        f"{path.relative_to(package)}: {name}"
        for path in package.rglob("*.py")
        if path.parent.name != "_lightning"
        for name in imports_from_lightning(path)
        if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    }
    assert found == set()


def imports_from_lightning(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return [name for name in names if name.split(".")[0] == "lightning"]
