"""Where what was built on this machine is kept, outside of any environment."""

import os
from pathlib import Path
from typing import Final

#: Names another place.
VARIABLE: Final = "LIGHTNING_STRATEGIES_EXT_CACHE"


def directory(kind: str) -> Path:
    """The directory of one kind of things, which need not exist."""
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser() / kind
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lightning-strategies-ext" / kind
