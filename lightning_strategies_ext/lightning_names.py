"""The two names of Lightning, and this package's modules for each.

The packages ``lightning`` and ``pytorch_lightning`` (with ``lightning_fabric``) contain the same code, but their
classes are distinct. Modules that import Lightning therefore exist twice: the source, for ``lightning``, and a mirror
below :data:`MIRROR`, for the other name. ``hatch_build.py`` generates the mirror when the package is built or
installed.
"""

import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from lightning_strategies_ext import discovery

PACKAGE = "lightning_strategies_ext"
#: Package of the mirrored modules, for ``pytorch_lightning``.
MIRROR = f"{PACKAGE}.pytorch_lightning"


def module_of_package(kind: type) -> str:
    """Returns the module of the first class of this package in the MRO of a class."""
    return next(base.__module__ for base in kind.__mro__ if base.__module__.partition(".")[0] == PACKAGE)


@dataclass(frozen=True)
class LightningName:
    """A name of Lightning.

    Attributes:
        package: Package that users import.
        trainer: Package of the Trainer.
        fabric: Package of Fabric.
        package_for_it: Package of this project's modules for the name.
    """

    package: str
    trainer: str
    fabric: str
    package_for_it: str

    def path(self, path: str) -> str:
        """Returns the path of a module of this package for this name of Lightning.

        Args:
            path: Path of the module for ``lightning``, optionally with a class after a colon.
        """
        return self.package_for_it + path.removeprefix(PACKAGE)

    def load(self, path: str) -> ModuleType:
        """Imports a module of this package for this name of Lightning.

        Args:
            path: Path of the module for ``lightning``.

        Raises:
            ModuleNotFoundError: If the module requires Lightning, which is not installed.
            ImportError: If a malicious release of Lightning is installed; it has not been imported.
        """
        return self.import_module(self.path(path))

    def import_module(self, path: str) -> ModuleType:
        """Imports a module of Lightning, or a module that requires it. Raises the exceptions of :meth:`load`."""
        if malicious := discovery.find_malicious_releases():
            raise ImportError(discovery.describe_malicious_releases(malicious))
        try:
            return import_module(path)
        except ModuleNotFoundError as error:
            if error.name not in (LIGHTNING.package, PYTORCH_LIGHTNING.package, PYTORCH_LIGHTNING.fabric):
                raise
            raise ModuleNotFoundError(
                f"Lightning is required, but the package {error.name!r} is not installed. Run `pip install"
                " lightning`, or `pip install pytorch-lightning` if your code imports that name.",
                name=error.name,
            ) from error

    def is_imported(self) -> bool:
        """Returns whether this process has imported Lightning under this name."""
        return self.trainer in sys.modules or self.fabric in sys.modules


LIGHTNING = LightningName("lightning", "lightning.pytorch", "lightning.fabric", PACKAGE)
PYTORCH_LIGHTNING = LightningName("pytorch_lightning", "pytorch_lightning", "lightning_fabric", MIRROR)


def name_for_module(module: str) -> LightningName:
    """Returns the name of Lightning for which a module of this package is."""
    return PYTORCH_LIGHTNING if module == MIRROR or module.startswith(f"{MIRROR}.") else LIGHTNING


def current_name() -> LightningName:
    """Returns the name of Lightning for attributes of this package that exist for both names.

    It is the name that this process has imported or, before such an import, the name that is installed; ``lightning``
    if both are. A Trainer of the other name then rejects the strategy, and its message names the package for it.
    """
    for name in (LIGHTNING, PYTORCH_LIGHTNING):
        if name.is_imported():
            return name
    is_only_other = find_spec(LIGHTNING.package) is None and find_spec(PYTORCH_LIGHTNING.package) is not None
    return PYTORCH_LIGHTNING if is_only_other else LIGHTNING
