"""The two names that Lightning goes by, and where our modules are for each.

The packages ``lightning`` and ``pytorch_lightning`` (with ``lightning_fabric``) hold the same code, and a class of one
is none of the other. So what speaks to Lightning is there twice: as it is written, for ``lightning``, and below
:data:`TWIN`, for the other name. ``hatch_build.py`` makes that from the first when the package is built or installed.
"""

import sys
from dataclasses import dataclass
from importlib.util import find_spec

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

    def is_imported(self) -> bool:
        """Whether this process has imported it."""
        return self.trainer in sys.modules or self.fabric in sys.modules


LIGHTNING = Name("lightning", "lightning.pytorch", "lightning.fabric", PACKAGE)
PYTORCH_LIGHTNING = Name("pytorch_lightning", "pytorch_lightning", "lightning_fabric", TWIN)


def name_of(module: str) -> Name:
    """For which name a module of ours is."""
    return PYTORCH_LIGHTNING if module == TWIN or module.startswith(f"{TWIN}.") else LIGHTNING


def in_use() -> Name:
    """For which name things are that are asked for without saying so.

    That is the one that this process has imported, or has installed; ``lightning`` if it is both.
    """
    for name in (LIGHTNING, PYTORCH_LIGHTNING):
        if name.is_imported():
            return name
    return LIGHTNING if find_spec(LIGHTNING.package) or not find_spec(PYTORCH_LIGHTNING.package) else PYTORCH_LIGHTNING
