"""Creates the files of a wheel that are not under version control.

``lightning_strategies_ext/pytorch_lightning``: the mirror for ``pytorch_lightning``. The packages ``lightning`` and
``pytorch_lightning`` have the same code under different names. The hook copies each module that imports ``lightning``,
directly or through another module, and replaces the names in the copy. All other modules exist once. The hook runs in
builds and in installations, including editable ones. Run ``python hatch_build.py`` after a change to the sources.

``lightning_strategies_ext/shm/all_reduce.so``: the native library, if the wheel is for one architecture. The variable
``LIGHTNING_STRATEGIES_EXT_WHEEL_ARCH`` of the environment selects it: ``x86_64`` or ``aarch64``. Without the variable,
the wheel is for all architectures, and the library is compiled at first use.

Metadata: the environment variable ``LIGHTNING_STRATEGIES_EXT_REPOSITORY_URL`` is the URL of the repository. If it is
set, the metadata contain URLs, and the links of the README are absolute. No file of the repository contains the URL.
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
#: Packages that only re-export names. Their imports do not decide which modules are mirrored.
_EXPORTING_PACKAGES = (PACKAGE, f"{PACKAGE}.fabric")
#: Environment variable with the architecture of the wheel.
ARCH_VARIABLE = "LIGHTNING_STRATEGIES_EXT_WHEEL_ARCH"
_MACHINES = ("x86_64", "aarch64")
#: Environment variable with the URL of the repository.
REPOSITORY_URL_VARIABLE = "LIGHTNING_STRATEGIES_EXT_REPOSITORY_URL"
_PAGES = {"Documentation": "docs/README.md", "Changelog": "CHANGELOG.md", "Security": "SECURITY.md"}
#: Oldest glibc version that the native library supports.
_GLIBC = (2, 17)


class WheelContents(BuildHookInterface[Any]):
    """Build hook: adds the mirror and the native library to a wheel."""

    PLUGIN_NAME = "custom"
    _made: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Writes the mirror, compiles the native library, and adds both to the wheel."""
        root = Path(self.root)
        write(root, root)
        build_data["artifacts"].append(f"/{MIRROR.replace('.', '/')}/**/*.py")
        # Editable installs need a copy of the module, too: they otherwise contain only the path of the checkout.
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
        """Removes the temporary copy of the native library."""
        if self._made is not None:
            self._made.cleanup()


class Metadata(MetadataHookInterface):
    """Metadata hook: sets the dynamic fields of ``pyproject.toml``."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets the text of the README, and the URLs of the project if the URL of the repository is set."""
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
    """Cross-compiles the native library with the compiler of the package ``ziglang``.

    Args:
        machine: Target architecture, as ``uname -m`` prints it.
        compiler: Path of the module ``shm/compiler.py``.
        into: Path of the library to create.

    Raises:
        ValueError: If wheels are not built for this architecture.
    """
    if machine not in _MACHINES:
        raise ValueError(f"{ARCH_VARIABLE}={machine!r}: wheels are built for {' and '.join(_MACHINES)}")
    words = [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{_GLIBC[0]}.{_GLIBC[1]}", "-s"]
    caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(into.parent / "cache"))
    runpy.run_path(str(compiler))["compile_library"](words, into, {**os.environ, **caches})


def write(root: Path, target: Path) -> None:
    """Writes the mirror; leaves files that are up to date unchanged, and removes outdated files.

    Args:
        root: Directory that contains the package.
        target: Directory to write to, usually ``root``.
    """
    directory = target / MIRROR.replace(".", "/")
    texts = mirrored_sources(root)
    for path in directory.rglob("*.py"):
        if path.relative_to(directory) not in texts:
            path.unlink()
    for name, text in texts.items():
        path = directory / name
        if not path.exists() or path.read_text() != text:  # a running process may be importing the file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def mirrored_sources(root: Path) -> dict[Path, str]:
    """Returns the source texts of the mirror, by path relative to the mirror's package."""
    modules = modules_of(root)
    names = modules_with_lightning(modules)
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
    """Returns a source text in which the names of ``lightning`` are replaced by those of ``pytorch_lightning``.

    Args:
        text: The source text.
        names: Names of the package's modules that have a mirror.
        modules: Names of all modules of the package.
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
    """Returns the package's modules outside of the mirror: paths by module name."""
    modules = {}
    for path in (root / PACKAGE).rglob("*.py"):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if not f"{name}.".startswith(f"{MIRROR}."):
            modules[name] = path
    return modules


def modules_with_lightning(modules: dict[str, Path]) -> set[str]:
    """Returns the modules that import Lightning, directly or indirectly, and the packages that re-export them."""
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
    """Returns the names of the modules that a source text imports, except under ``TYPE_CHECKING``."""
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
