"""The two names that Lightning goes by, and where our modules are for each.

The packages ``lightning`` and ``pytorch_lightning`` (with ``lightning_fabric``) hold the same code, and a class of one
is none of the other. So what speaks to Lightning is there twice: as it is written, for ``lightning``, and below
:data:`TWIN`, for the other name. ``hatch_build.py`` makes that from the first when the package is built or installed.
"""

import ast
import linecache
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import FrameType, ModuleType

from lightning_strategies_ext import discovery

PACKAGE = "lightning_strategies_ext"
#: The package of the modules for ``pytorch_lightning``.
TWIN = f"{PACKAGE}.pytorch_lightning"


@dataclass(frozen=True)
class Name:
    """One of the two.

    Attributes:
        package: What a user imports.
        trainer: Where its Trainer is.
        fabric: Where its Fabric is.
        ours: The package that has our modules for it.
    """

    package: str
    trainer: str
    fabric: str
    ours: str

    def path(self, path: str) -> str:
        """Where a module of ours that speaks to Lightning is for this name.

        Args:
            path: Of the module for ``lightning``; there may be a class after a colon.
        """
        return self.ours + path.removeprefix(PACKAGE)

    def load(self, path: str) -> ModuleType:
        """Imports that module.

        Raises:
            ModuleNotFoundError: If it needs Lightning, which is not installed.
            ImportError: If a malicious release of Lightning is installed. Nothing of it has been imported.
        """
        return self.import_module(self.path(path))

    def import_module(self, path: str) -> ModuleType:
        """Imports a module of Lightning, or one that needs Lightning. Raises like :meth:`load`."""
        if malicious := discovery.find_malicious_releases():
            raise ImportError(discovery.describe_malicious_releases(malicious))
        try:
            return import_module(path)
        except ModuleNotFoundError as error:
            if error.name not in (LIGHTNING.package, PYTORCH_LIGHTNING.package, PYTORCH_LIGHTNING.fabric):
                raise
            raise ModuleNotFoundError(
                f"This needs Lightning, and there is no {error.name!r} here. `pip install lightning`, or"
                " `pip install pytorch-lightning` for whoever calls it so.",
                name=error.name,
            ) from error

    def is_imported(self) -> bool:
        """Whether this process has imported it."""
        return self.trainer in sys.modules or self.fabric in sys.modules


LIGHTNING = Name("lightning", "lightning.pytorch", "lightning.fabric", PACKAGE)
PYTORCH_LIGHTNING = Name("pytorch_lightning", "pytorch_lightning", "lightning_fabric", TWIN)


def name_of(module: str) -> Name:
    """For which name a module of ours is."""
    return PYTORCH_LIGHTNING if module == TWIN or module.startswith(f"{TWIN}.") else LIGHTNING


def in_use(asked_by: FrameType | None = None) -> Name:
    """For which name things are that are asked for without saying so.

    That is the one that this process has imported, ``lightning`` if both. Before that, it is the one that is imported
    by whoever asks: sorted, imports of this package stand before ``import pytorch_lightning``. Then it is the one that
    is installed; pip installs both for who asks for ``lightning``.

    Args:
        asked_by: A frame of the program that asks, or of Python's import system on its behalf.
    """
    for name in (LIGHTNING, PYTORCH_LIGHTNING):
        if name.is_imported():
            return name
    if find_spec(LIGHTNING.package) is None and find_spec(PYTORCH_LIGHTNING.package) is not None:
        return PYTORCH_LIGHTNING
    imported = _imported_by(asked_by)
    is_other = bool(imported & {PYTORCH_LIGHTNING.package, PYTORCH_LIGHTNING.fabric})
    return PYTORCH_LIGHTNING if is_other and LIGHTNING.package not in imported else LIGHTNING


def _imported_by(frame: FrameType | None) -> set[str]:
    """The packages that a program imports, as far as its source is there."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib."):
        frame = frame.f_back
    try:
        tree = ast.parse("" if frame is None else "".join(linecache.getlines(frame.f_code.co_filename)))
    except (SyntaxError, ValueError):
        return set()
    nodes = list(ast.walk(tree))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {module.partition(".")[0] for module in modules}
