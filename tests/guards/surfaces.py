"""Describes the public interface as text: command line, signatures, registered names, keys of the doctor's JSON.

The text does not depend on the terminal, on the machine, or on other imports of this process. The snapshots of the text
are in ``tests/guards/snapshots``, and this command rewrites them::

    python -m tests.guards --write
"""

import contextlib
import difflib
import inspect
import io
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Any
from unittest import mock

import yaml
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.strategies import Strategy, StrategyRegistry

import lightning_strategies_ext
from lightning_strategies_ext import __main__, fabric
from lightning_strategies_ext.lightning_names import LIGHTNING, PYTORCH_LIGHTNING
from lightning_strategies_ext.registry import LazyStrategy
from tests.guards.versions import COMMAND, versions_of
from tests.support.ranks import REPOSITORY

SNAPSHOTS = Path(__file__).parent / "snapshots"
_PACKAGE = "lightning_strategies_ext"
_WIDTH = 120


@dataclass(frozen=True)
class Surface:
    """A part of the public interface.

    Attributes:
        name: Name of the snapshot.
        make: Function that creates the description.
        packages: Packages whose versions the description depends on.
    """

    name: str
    make: Callable[[], str]
    packages: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The snapshot."""
        return SNAPSHOTS / f"{self.name}.txt"

    @property
    def versions(self) -> str:
        """The installed versions that the description depends on."""
        return versions_of(*self.packages) if self.packages else "any versions"

    def read(self) -> tuple[str, str]:
        """Reads the versions and the description of the snapshot.

        Raises:
            FileNotFoundError: If the snapshot does not exist.
        """
        first, _, rest = self.path.read_text().partition("\n")
        return first.removeprefix("# "), rest

    def write(self) -> None:
        """Writes the snapshot."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(f"# {self.versions}\n{self.make()}")

    def difference(self) -> str:
        """Returns a diff from the snapshot to the installed package, with a command to accept it; empty if equal."""
        _, before = self.read()
        lines = difflib.unified_diff(
            before.splitlines(), self.make().splitlines(), "snapshot", "installed", lineterm="", n=2
        )
        diff = "\n".join(lines)
        path = self.path.relative_to(REPOSITORY)
        return diff and f"The public interface differs from {path}:\n{diff}\nTo accept the change: {COMMAND}"


# --- the command line ---


def strategy_classes() -> list[str]:
    """Returns the names of the strategies that can be constructed."""
    exported = {name: getattr(lightning_strategies_ext, name) for name in lightning_strategies_ext._EXPORTS}
    return [
        name
        for name, kind in exported.items()
        if inspect.isclass(kind) and issubclass(kind, Strategy) and not inspect.isabstract(kind)
    ]


def fit_help() -> str:
    """Returns the options of ``fit --help`` for the strategy."""
    parts = _in_parts(_output_of_command_line("--help"))
    return "".join(part for part in parts if part.lstrip().startswith("--trainer.strategy"))


def strategy_help(name: str) -> str:
    """Returns the help for a strategy class, and its printed config."""
    path = f"{_PACKAGE}.{name}"
    parts = _in_parts(_output_of_command_line(f"--trainer.strategy.help={path}"))
    config = yaml.safe_load(_output_of_command_line(f"--trainer.strategy.class_path={path}", "--print_config"))
    return (
        f"$ fit --trainer.strategy.help={path}\n{''.join(parts)}\n"
        f"$ fit --trainer.strategy.class_path={path} --print_config\n"
        f"{yaml.safe_dump({'strategy': config['trainer']['strategy']}, sort_keys=False)}"
    )


def _output_of_command_line(*options: str) -> str:
    output = io.StringIO()
    argv = mock.patch.object(sys, "argv", ["script.py", "fit", *options])
    environment = mock.patch.dict(os.environ, {"COLUMNS": "100000"})
    with argv, environment, contextlib.redirect_stdout(output):
        try:
            LightningCLI(BoringModel, BoringDataModule)
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(f"LightningCLI refused {options}") from ended
    return output.getvalue()


def _in_parts(text: str) -> Iterator[str]:
    """Yields the parts of a help text without the usage, as wrapped lines; a part is an option with its description."""
    # The known subclasses depend on the imports of this process.
    text = re.sub(r",? ?known subclasses: [\w., ]+(?=\))", "", text.partition("\n\n")[2])
    for paragraph in re.split(r"\n(?! {10})", text.strip("\n")):
        first, *others = paragraph.split("\n")
        indent = " " * (len(first) - len(first.lstrip()))
        yield "".join(f"{line}\n" for line in [first, *_wrapped(" ".join(map(str.strip, others)), f"{indent}    ")])


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


# --- signatures ---


def public_paths() -> list[str]:
    """Returns the paths of all public classes and functions, as users import them."""
    paths = {f"{module.__name__}.{name}" for module in (lightning_strategies_ext, fabric) for name in module._EXPORTS}
    for path, members in _documented().items():
        paths |= {f"{path}.{member}" for member in members} or {path}
    return sorted(path for path in paths if callable(_find(path)))


def signatures() -> str:
    """Describes the signatures of all public functions and classes, and of public methods and properties.

    Methods that a class inherits from another public class, or from another package, are named only.
    """
    return "\n".join("".join(f"{line}\n" for line in _described(path)) for path in public_paths())


def _documented() -> dict[str, list[str]]:
    """Returns the paths that a page of the reference documents → the members that the page names."""
    text = "".join(path.read_text() for path in sorted((REPOSITORY / "docs" / "reference").glob("*.md")))
    found = {}
    for path, options in re.findall(r"^::: (\S+)\n((?: {4}.*\n)*)", text, re.MULTILINE):
        members = re.search(r"members: \[(.*)\]", options)
        found[path] = members[1].split(", ") if members else []
    return found


def _find(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name) if module else import_module(name)


@cache
def _public_classes() -> set[type]:
    return {found for found in map(_find, public_paths()) if inspect.isclass(found)}


def _described(path: str) -> Iterator[str]:
    found = _find(path)
    if not inspect.isclass(found):
        yield from _with_signature(path, found)
        return
    yield from _with_signature(f"class {path}", found)
    yield from _wrapped(f"bases: {', '.join(map(_path_of, found.__bases__))}", "    ")
    names = [name for name in dir(found) if not name.startswith("_")]
    owner_of = {name: next(base for base in found.__mro__ if name in vars(base)) for name in names if _has(found, name)}
    # A private base, such as a mixin, is a part of the class.
    parts = [
        base for base in found.__mro__ if _is_of_package(base) and (base is found or base not in _public_classes())
    ]
    for name, owner in owner_of.items():
        if owner in parts:
            yield from _member(name, vars(owner)[name])
    for base in found.__mro__:
        inherited = [name for name, owner in owner_of.items() if owner is base and base not in parts]
        if inherited and base is not object:
            yield f"    from {_path_of(base)}:"
            yield from _wrapped(", ".join(inherited), "        ")


def _has(kind: type, name: str) -> bool:
    """Returns whether objects of a class have an attribute, and not only the class through its metaclass.

    Names of earlier versions raise an AttributeError.
    """
    return hasattr(kind, name) and any(name in vars(base) for base in kind.__mro__)


def _member(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, property):
        yield from _with_signature(f"    property {name}", value.fget)
    elif isinstance(value, (classmethod, staticmethod)):
        yield from _with_signature(f"    {type(value).__name__} {name}", value.__func__)
    elif callable(value):
        yield from _with_signature(f"    {name}", value)
    elif isinstance(value, (str, int, float, NoneType)):
        yield f"    {name} = {value!r}"
    else:  # its repr may depend on the order of a set
        yield f"    {name}: {type(value).__name__}"


def _with_signature(name: str, function: Any) -> Iterator[str]:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a class or function in C has no signature
        yield f"{name}(...)"
        return
    line = _plain(f"{name}{signature}")
    if len(line) <= _WIDTH:
        yield line
        return
    indent = " " * (len(name) - len(name.lstrip()) + 8)
    yield f"{name}("
    for parameter in signature.parameters.values():
        yield f"{indent}{_plain(str(parameter))},"
    result = signature.return_annotation
    returned = "" if result is signature.empty else f" -> {inspect.formatannotation(result)}"
    yield f"{indent[:-4]}){_plain(returned)}"


def _plain(text: str) -> str:
    """Returns a text without addresses of objects."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_of_package(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == _PACKAGE


# --- names, doctor ---


def registered_names() -> str:
    """Returns the names that this package has registered in each front end, with class, arguments and description."""
    lines = []
    for front_end, registry in (("Trainer", StrategyRegistry), ("Fabric", STRATEGY_REGISTRY)):
        for name, entry in registry.items():
            strategy = entry["strategy"]
            if isinstance(strategy, LazyStrategy) and strategy.owner == LazyStrategy("").owner:
                arguments = ", ".join(f"{key}={value!r}" for key, value in entry["init_params"].items())
                target = strategy.target.replace(PYTORCH_LIGHTNING.package_for_it, LIGHTNING.package_for_it)
                lines.append(f"{front_end}: {name} = {target}({arguments})\n    {entry['description']}\n")
    return "".join(lines)


def doctor_keys() -> str:
    """Describes the keys of the doctor's JSON (``python -m lightning_strategies_ext --json``); ``[]`` is an item."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        __main__.main(["--json"])
    return "".join(f"{path}\n" for path in dict.fromkeys(_keys(json.loads(output.getvalue()))))


def _keys(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{path}/{key}"
            yield from _keys(inner, f"{path}/{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner, f"{path}[]")


_FRONT_END = ("Python", "torch", "lightning")
_COMMAND_LINE = (*_FRONT_END, "jsonargparse", "docstring_parser", "typeshed_client")


def surfaces() -> list[Surface]:
    """Returns all parts of the public interface."""
    return [
        Surface("command_line/fit", fit_help, _COMMAND_LINE),
        *(Surface(f"command_line/{name}", partial(strategy_help, name), _COMMAND_LINE) for name in strategy_classes()),
        Surface("signatures", signatures, _FRONT_END),
        Surface("registered_names", registered_names),
        Surface("doctor_keys", doctor_keys),
    ]


def write_all() -> None:
    """Rewrites all snapshots."""
    for path in SNAPSHOTS.rglob("*.txt"):
        path.unlink()
    for surface in surfaces():
        surface.write()
