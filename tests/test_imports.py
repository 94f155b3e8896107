"""Imports within the package: layers, cycles, and modules that work without Lightning."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.ranks import REPOSITORY

PACKAGE = "lightning_strategies_ext"
ENGINES = {"torch_distributed", "horovod", "shm"}
FRONT_ENDS = {"pytorch", "fabric"}
#: The packages that each package must not import. The front ends are the top layer.
NOT_IMPORTED_BY = {
    "fabric": {"pytorch"},
    "stage_context": FRONT_ENDS | ENGINES,
    "coordinated_stop": FRONT_ENDS | ENGINES | {"stage_context"},
    "elastic": FRONT_ENDS | ENGINES,
    "uneven": FRONT_ENDS | ENGINES,
    "monitoring": FRONT_ENDS | ENGINES | {"launch", "elastic", "uneven", "failure"},
    "failure": FRONT_ENDS | ENGINES | {"collectives", "launch"},
    "collectives": FRONT_ENDS | ENGINES | {"failure", "launch"},
    "torch_distributed": FRONT_ENDS | {"horovod", "launch"},
    "horovod": FRONT_ENDS | {"torch_distributed", "shm"},
    "shm": FRONT_ENDS | {"torch_distributed", "horovod", "launch", "failure", "collectives"},
    "launch": FRONT_ENDS | ENGINES,
    "replication": FRONT_ENDS | ENGINES | {"launch"},
    "_system": FRONT_ENDS
    | ENGINES - {"shm"}
    | {"launch", "failure", "collectives", "elastic", "uneven", "monitoring", "replication"},
}
#: Packages and modules that work without Lightning.
WITHOUT_LIGHTNING = (
    *("shm", "collectives", "failure", "launch/processes", "launch/transport", "launch/protocol.py"),
    *("horovod/runtime.py", "horovod/launch_info.py", "horovod/gradient_exchange.py", "horovod/collectives.py"),
    *("horovod/elastic_driver.py", "horovod/batch_norm.py", "elastic/membership.py", "_system/peers.py", "nested.py"),
    *("torch_distributed/process_group.py", "torch_distributed/backend_checks.py", "torch_distributed/compression"),
    "torch_distributed/exchange_timer.py",
    *("launch/ray/cluster.py", "launch/ray/worker_link.py"),  # the others there require Ray or a POSIX system
    "monitoring",
)


def modules_of(package: str) -> list[Path]:
    path = REPOSITORY / PACKAGE / package
    return sorted(path.rglob("*.py")) if path.is_dir() else [path if path.suffix else path.with_suffix(".py")]


def name_of(module: Path) -> str:
    return ".".join(module.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


def packages_imported_by(module: Path) -> set[str]:
    """Returns the packages that a module imports, also in functions and for types only."""
    imported = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE:
            parts = node.module.split(".")[1:]
            imported |= {parts[0]} if parts else {alias.name for alias in node.names}
    return imported


@pytest.mark.parametrize("package", NOT_IMPORTED_BY)
def test_a_package_imports_only_from_lower_layers(package: str) -> None:
    found = {name_of(module): packages_imported_by(module) & NOT_IMPORTED_BY[package] for module in modules_of(package)}
    assert {name: imported for name, imported in found.items() if imported} == {}


def import_graph() -> dict[str, set[str]]:
    """Returns the modules that each module imports at its import, and the modules that it imports for types."""
    paths = [path for path in modules_of(".") if f"/{PACKAGE}/pytorch_lightning/" not in str(path)]
    modules = {name_of(path): path for path in paths}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        graph[name] = set()
        for node in statements_of_module(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                submodules = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[name] |= submodules & modules.keys() or {node.module} & modules.keys()
            elif isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names} & modules.keys()
    return graph


def statements_of_module(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields all nodes outside functions."""
    for child in ast.iter_child_nodes(tree):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from statements_of_module(child)


def reachable_from(name: str, graph: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def test_no_module_imports_itself_through_others() -> None:
    graph = import_graph()
    assert graph[f"{PACKAGE}.launch.worker_launcher"] >= {f"{PACKAGE}.launch.worker_group"}
    in_cycles = sorted(name for name in graph if name in reachable_from(name, graph))
    assert in_cycles == []


@pytest.mark.processes
def test_packages_without_lightning_can_be_imported_where_it_is_missing():
    names = [name_of(module) for package in WITHOUT_LIGHTNING for module in modules_of(package)]
    program = "import sys; sys.modules['lightning'] = None; import importlib; [importlib.import_module(n) for n in "
    result = subprocess.run([sys.executable, "-c", f"{program}{names}]"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
