"""Creates the contents of a wheel that are not under version control.

``lightning_strategies_ext/pytorch_lightning``: the mirror for ``pytorch_lightning``. The two packages of Lightning have
the same code under different names. Each module that imports ``lightning``, or imports a module that does, is written
again with the other names. Every other module exists once. Builds and installations run this hook, also editable ones;
after a change to the sources, run ``python hatch_build.py``.

``lightning_strategies_ext/shm/all_reduce.so``: the native library, if the wheel is for one architecture.
``LIGHTNING_STRATEGIES_EXT_WHEEL_ARCH``, an environment variable, names it: ``x86_64`` or ``aarch64``. Without the
variable, the wheel is for all architectures, and the library is compiled at first use.

Metadata: ``LIGHTNING_STRATEGIES_EXT_REPOSITORY_URL`` is the URL of the repository, which no file contains. With it, the
metadata have URLs, and the links of the README are absolute.
"""

import ast
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Container
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PACKAGE = "lightning_strategies_ext"
MIRROR = f"{PACKAGE}.pytorch_lightning"
_OTHER_NAMES = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}
#: They offer what other modules define, and would be counted among those.
_EXPORTING_PACKAGES = (PACKAGE, f"{PACKAGE}.fabric")
#: Environment variable with the architecture of the wheel.
ARCH_VARIABLE = "LIGHTNING_STRATEGIES_EXT_WHEEL_ARCH"
_MACHINES = ("x86_64", "aarch64")
#: Environment variable with the URL of the repository.
REPOSITORY_URL_VARIABLE = "LIGHTNING_STRATEGIES_EXT_REPOSITORY_URL"
_PAGES = {"Documentation": "docs/README.md", "Changelog": "CHANGELOG.md", "Security": "SECURITY.md"}
#: The oldest C library of GNU that the compiled part runs with, as compilers and as tags of wheels write it.
_GLIBC = (2, 17)


class WheelContents(BuildHookInterface[Any]):
    """What hatchling calls before and after it builds a wheel."""

    PLUGIN_NAME = "custom"
    _made: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Writes the modules, and has the wheel take them though version control does not; compiles the library."""
        root = Path(self.root)
        write(root, root)
        build_data["artifacts"].append(f"/{MIRROR.replace('.', '/')}/**/*.py")
        # A copy in editable installs too, which otherwise only say where the checkout is.
        included = "force_include_editable" if version == "editable" else "force_include"
        build_data[included][str(root / PACKAGE / "autoload.py")] = f"{PACKAGE}_autoload.py"
        machine = os.environ.get(ARCH_VARIABLE)
        if machine and version == "standard":
            self._made = tempfile.TemporaryDirectory()
            library = Path(self._made.name, "all_reduce.so")
            compile_for(machine, root / PACKAGE / "shm" / "compiler.py", library)
            build_data["force_include"][str(library)] = f"{PACKAGE}/shm/all_reduce.so"
            build_data["tag"] = f"py3-none-manylinux_{_GLIBC[0]}_{_GLIBC[1]}_{machine}"
            build_data["pure_python"] = False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes the library, which the wheel has now."""
        if self._made is not None:
            self._made.cleanup()


class Metadata(MetadataHookInterface):
    """What hatchling calls for what ``pyproject.toml`` leaves open."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Says what the README is, and where the project is if that is known."""
        text = Path(self.root, "README.md").read_text()
        address = os.environ.get(REPOSITORY_URL_VARIABLE, "").rstrip("/")
        metadata["urls"] = {}
        if address:
            metadata["urls"] = {"Repository": address, "Issues": f"{address}/issues"}
            metadata["urls"] |= {name: f"{address}/blob/HEAD/{path}" for name, path in _PAGES.items()}
            text = re.sub(r"(!\[[^]]*\]\()(?!\w+:)", rf"\1{address}/raw/HEAD/", text)
            text = re.sub(r"(\]\()(?!\w+:|#)", rf"\1{address}/blob/HEAD/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def compile_for(machine: str, compiler: Path, into: Path) -> None:
    """Compiles the library for a kind of machine, on any kind, with the compiler of the package ``ziglang``.

    Args:
        machine: As ``uname -m`` names it.
        compiler: Our module that calls compilers.
        into: The file to make.

    Raises:
        ValueError: If wheels are not built for such machines.
    """
    if machine not in _MACHINES:
        raise ValueError(f"{ARCH_VARIABLE}={machine!r}: wheels are built for {' and '.join(_MACHINES)}")
    words = [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{_GLIBC[0]}.{_GLIBC[1]}", "-s"]
    caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(into.parent / "cache"))
    runpy.run_path(str(compiler))["compile_library"](words, into, {**os.environ, **caches})


def write(root: Path, target: Path) -> None:
    """Writes the modules for ``pytorch_lightning`` in place of those that are there and differ.

    Args:
        root: The directory that has the package.
        target: The same, or another one to write to.
    """
    directory = target / MIRROR.replace(".", "/")
    texts = twins(root)
    for path in directory.rglob("*.py"):
        if path.relative_to(directory) not in texts:
            path.unlink()
    for name, text in texts.items():
        path = directory / name
        if not path.exists() or path.read_text() != text:  # a process may be importing them
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def twins(root: Path) -> dict[Path, str]:
    """The modules for ``pytorch_lightning``, by their paths within the package for it."""
    modules = modules_of(root)
    names = knowing_lightning(modules)
    texts = {}
    for name in names:
        path = modules[name].relative_to(root / PACKAGE)
        note = f"# Made by hatch_build.py from {PACKAGE}/{path}. Change that.\n"
        texts[path] = note + rewritten(modules[name].read_text(), names, set(modules))
    for path in list(texts):
        for parent in path.parents:
            texts.setdefault(parent / "__init__.py", "")
    return texts


def rewritten(text: str, names: set[str], modules: set[str]) -> str:
    """A source with the names of ``pytorch_lightning`` in it.

    Args:
        text: The source.
        names: The modules of ours that are there for it.
        modules: All of ours.
    """

    def module(match: re.Match[str]) -> str:
        parts = match[0].split(".")
        longest = next(".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in modules)
        return MIRROR + match[0].removeprefix(PACKAGE) if longest in names and longest != PACKAGE else match[0]

    def imports(match: re.Match[str]) -> str:
        indent, source, imported = match.groups()
        each = [name.strip() for name in imported.strip("()").split(",") if name.strip()]
        of_mirror = [name for name in each if f"{source}.{name.partition(' ')[0]}" in names]
        if not of_mirror:
            return match[0]
        others = [name for name in each if name not in of_mirror]
        lines = [f"{indent}from {source} import {', '.join(others)}"] if others else []
        lines.append(f"{indent}from {MIRROR}{source.removeprefix(PACKAGE)} import {', '.join(of_mirror)}")
        return "\n".join(lines)

    imported = r"(\w.*|\([\w\s,]*\))"
    text = re.sub(rf"^( *)from ({PACKAGE}(?:\.\w+)*) import {imported}$", imports, text, flags=re.MULTILINE)
    text = re.sub(rf"(?<![\w.]){PACKAGE}(\.\w+)+(?! import )", module, text)
    text = re.sub(rf"(?<=from ){PACKAGE}(\.\w+)+(?= import)", module, text)
    for name, other in _OTHER_NAMES.items():
        text = re.sub(rf"(?<![\w.]){re.escape(name)}\b", other, text)
    return text


def modules_of(root: Path) -> dict[str, Path]:
    """Our modules for ``lightning`` and for none, with their files."""
    modules = {}
    for path in (root / PACKAGE).rglob("*.py"):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if not f"{name}.".startswith(f"{MIRROR}."):
            modules[name] = path
    return modules


def knowing_lightning(modules: dict[str, Path]) -> set[str]:
    """The modules that import Lightning, or one of ours that does, and the packages that offer what is in them."""
    imported = {
        name: imported_by(path.read_text(), modules)
        for name, path in modules.items()
        if name not in _EXPORTING_PACKAGES
    }
    names = {name for name, known in imported.items() if any(other.split(".")[0] == "lightning" for other in known)}
    while more := {name for name, known in imported.items() if known & names} - names:
        names |= more
    return {*names, *_EXPORTING_PACKAGES}


def imported_by(text: str, modules: Container[str]) -> set[str]:
    """The modules that a source imports, other than for types."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in whole}
    return found


if __name__ == "__main__":
    write(Path(__file__).parent, Path(__file__).parent)
