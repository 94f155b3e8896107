"""Names of the package that benchmarks use, for today's revision and for older ones.

``python -m benchmarks.step_time --against REV`` measures two revisions of the package with today's benchmark programs.
Older revisions may have other names, or may lack a feature. The measured code therefore takes every name of the
package from here::

    from benchmarks import names

    strategy = names.DDPSpawnStrategy(elastic=True)

When a name is renamed or moved, put its new location first in its row of :data:`NAMES`, keep the old one behind it, and
rename the key. Locations have the form ``module:attribute``, where the module is below the package:

- a module, class, function or constant: ``"failure.local_status:StatusTable", "failure.status_table:StatusTable"``;
- a method: ``"failure.remote_status:RemoteStatus.publish", "failure.hosts:Hosts.tell"`` under the key
  ``publish_remote``, which is then called as ``names.publish_remote(hosts, ...)``;
- a keyword argument: ``":DDPStrategy(hang_timeout)", ":DDPStrategy(patience)"`` under the key ``hang_timeout``. The
  value is the name of the argument: ``DDPStrategy(**{names.hang_timeout: 60})``.
"""

import inspect
import os
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning_strategies_ext

PACKAGE = "lightning_strategies_ext"
#: Environment variable with the directory of the package to be measured; every process checks it.
PACKAGE_VARIABLE = "BENCHMARKS_PACKAGE"
#: Environment variables with the directory for native builds: all names that revisions have used.
CACHE_VARIABLES = ("LIGHTNING_STRATEGIES_EXT_CACHE_DIR", "LIGHTNING_STRATEGIES_EXT_CACHE")

#: Key → locations, the newest first.
NAMES: dict[str, tuple[str, ...]] = {
    # Strategies.
    "DDPStrategy": (":DDPStrategy",),
    "DDPSpawnStrategy": (":DDPSpawnStrategy",),
    "DDPElasticStrategy": (":DDPElasticStrategy",),
    "HorovodStrategy": (":HorovodStrategy",),
    "spawn_elastic": (":DDPSpawnStrategy(elastic)",),
    "horovod_elastic": (":HorovodStrategy(elastic)",),
    # Native build.
    "load_native_library": ("shm.native_build:library", "shm.compilation:library"),
    "NativeLibraryError": (
        "shm.compiler:NativeLibraryError",
        "shm.compiler:NotCompiledError",
        "shm.compilation:NotCompiledError",
    ),
    # Failure monitor, for `benchmarks.failure_monitor`.
    "ThreadActivity": ("failure.thread_activity:ThreadActivity", "failure.activity:Activity"),
    "StatusTable": ("failure.local_status:StatusTable", "failure.status_table:StatusTable", "failure.board:Board"),
    "open_status_table": (
        "failure.local_status:StatusTable.open_for_host",
        "failure.status_table:StatusTable.open_for_host",
        "failure.board:Board.of_host",
    ),
    "SLOT_NUM_BYTES": (
        "failure.local_status:SLOT_NUM_BYTES",
        "failure.status_table:SLOT_NUM_BYTES",
        "failure.board:SLOT_NUM_BYTES",
    ),
    "HEARTBEAT_INTERVAL_S": ("failure.local_status:HEARTBEAT_INTERVAL_S", "failure.host_signs:INTERVAL_S"),
    "RemoteStatus": ("failure.remote_status:RemoteStatus", "failure.hosts:Hosts"),
    "publish_remote": ("failure.remote_status:RemoteStatus.publish", "failure.hosts:Hosts.tell"),
    "RankStatus": ("failure.rank_status:RankStatus", "failure.signs:Sign"),
    "stage_and_step": ("failure.rank_status:RankStatus(stage_and_step)", "failure.signs:Sign(where)"),
    "HeartbeatAges": (
        "failure.failure_detector:HeartbeatAges",
        "failure.rank_status:HeartbeatAges",
        "failure.signs:Silence",
    ),
    "update_ages": (
        "failure.failure_detector:HeartbeatAges.update",
        "failure.rank_status:HeartbeatAges.update",
        "failure.signs:Silence.note",
    ),
    "first_failure": (
        "failure.failure_detector:first_failure",
        "failure.rank_status:first_failure",
        "failure.signs:first_failure",
    ),
    "hung_ranks": (
        "failure.failure_detector:hung_ranks",
        "failure.rank_status:hung_ranks",
        "failure.signs:stuck_ranks",
    ),
    "SelectorLoop": ("_system.selector_loop:SelectorLoop", "failure.waiting:Waiting"),
    "Peer": ("_system.peers:Peer", "peers:Peer"),
}


class MissingNameError(AttributeError):
    """Raised for a name that the revision does not have."""


def __getattr__(key: str) -> Any:
    if key not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {key!r}")
    for location in NAMES[key]:
        try:
            value = resolve(location)
        except MissingNameError:
            continue
        globals()[key] = value  # later lookups bypass this function, as timed loops require
        return value
    raise MissingNameError(f"the package has no {' or '.join(NAMES[key])}")


def resolve(location: str) -> Any:
    """Returns the object at a location of the form ``module:attribute``.

    Raises:
        MissingNameError: If the revision does not have it.
    """
    module_name, _, path = location.partition(":")
    path, _, argument = path.rstrip(")").partition("(")
    try:
        value: Any = import_module(f"{PACKAGE}.{module_name}".rstrip("."))
        for part in path.split("."):
            value = getattr(value, part)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(PACKAGE):
            raise  # the module exists, and a dependency of it is not installed
        raise MissingNameError(location) from error
    except AttributeError as error:
        raise MissingNameError(location) from error
    if not argument:
        return value
    if argument not in inspect.signature(value).parameters:
        raise MissingNameError(location)
    return argument


def find_missing(keys: Iterable[str]) -> list[str]:
    """Returns the newest locations of those names that the revision does not have."""
    missing = []
    for key in keys:
        try:
            __getattr__(key)
        except MissingNameError:
            missing.append(NAMES[key][0].lstrip(":"))
    return missing


def check_package() -> None:
    """Checks that this process has imported the revision to be measured.

    Raises:
        RuntimeError: If the package comes from another directory.
    """
    expected = os.environ.get(PACKAGE_VARIABLE)
    found = Path(lightning_strategies_ext.__file__).resolve().parent
    if expected and found != Path(expected):
        raise RuntimeError(
            f"This process imports {PACKAGE} from {found} instead of {expected}, the revision to be measured. Check"
            " `sys.path` for an entry in front of PYTHONPATH."
        )


check_package()
