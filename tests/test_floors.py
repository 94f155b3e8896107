"""The floors of ``docs/architecture.md``: what needs no Lightning, and which way imports point. Nothing runs here."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import REPOSITORY

PACKAGE = "lightning_strategies_ext"
ENGINES = {"torch_distributed", "horovod", "shm"}
FACES = {"pytorch", "fabric"}
#: What each room must know nothing of. The faces are above everything.
CLOSED = {
    "fabric": {"pytorch"},
    "stage_context": FACES | ENGINES,
    "elastic": FACES | ENGINES,
    "uneven": FACES | ENGINES,
    "monitoring": FACES | ENGINES | {"launch", "elastic", "uneven", "failure"},
    "failure": FACES | ENGINES | {"collectives", "launch"},
    "collectives": FACES | ENGINES | {"failure", "launch"},
    "torch_distributed": FACES | {"horovod", "launch"},
    "horovod": FACES | {"torch_distributed", "shm"},
    "shm": FACES | {"torch_distributed", "horovod", "launch", "failure", "collectives"},
    "launch": FACES | ENGINES,
    "replication": FACES | ENGINES | {"launch"},
    "_system": FACES
    | {
        "torch_distributed",
        "horovod",
        "launch",
        "failure",
        "collectives",
        "elastic",
        "uneven",
        "monitoring",
        "replication",
    },
}
#: Rooms, and files of rooms, that work where there is no Lightning.
WITHOUT_LIGHTNING = (
    *("shm", "collectives", "failure", "launch/processes", "launch/transport", "launch/protocol.py"),
    *("horovod/runtime.py", "horovod/launch.py", "horovod/exchange.py", "horovod/collectives.py"),
    *("horovod/elastic_driver.py", "horovod/batch_norm.py", "elastic/membership.py", "_system/peers.py", "nested.py"),
    *("torch_distributed/process_group.py", "torch_distributed/compression", "torch_distributed/exchange_times.py"),
    "monitoring",
)


def modules_of(room: str) -> list[Path]:
    path = REPOSITORY / PACKAGE / room
    return sorted(path.rglob("*.py")) if path.is_dir() else [path if path.suffix else path.with_suffix(".py")]


def name_of(module: Path) -> str:
    return ".".join(module.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


def rooms_known_to(module: Path) -> set[str]:
    """The rooms that a file imports anything of, also within functions, and for types."""
    known = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE:
            parts = node.module.split(".")[1:]
            known |= {parts[0]} if parts else {alias.name for alias in node.names}
    return known


@pytest.mark.parametrize("room", CLOSED)
def test_imports_point_down(room):
    found = {name_of(module): rooms_known_to(module) & CLOSED[room] for module in modules_of(room)}
    assert {name: known for name, known in found.items() if known} == {}


@pytest.mark.processes
def test_these_can_be_imported_where_there_is_no_lightning():
    names = [name_of(module) for room in WITHOUT_LIGHTNING for module in modules_of(room)]
    program = "import sys; sys.modules['lightning'] = None; import importlib; [importlib.import_module(n) for n in "
    result = subprocess.run([sys.executable, "-c", f"{program}{names}]"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
