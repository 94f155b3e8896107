"""Registers the strategy names with Lightning, without an import in the user's script.

torch calls :func:`install` at the end of ``import torch`` (entry-point group ``torch.backends``, torch 2.5 and later;
see :mod:`lightning_strategies_ext.autoload`). It registers import hooks, which register the backend ``shm`` with
torch.distributed and fill Lightning's strategy registries when their modules are imported. In a process that never
imports Lightning, it therefore adds only some dictionary entries.

``lazy_names`` is defined here, too, because each further module would add a quarter of a millisecond to every ``import
torch``.

``import torch`` and ``import lightning`` never fail because of this module. It reports an error once on standard error.
``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` disables torch's call; then ``import lightning_strategies_ext`` registers the names.

Other packages can register strategies the same way, through entry-point groups of this package (see
:data:`ENTRY_POINT_GROUPS`)::

    [project.entry-points."lightning.pytorch.strategies"]
    my_strategy = "my_package.strategies:MyStrategy"
"""

import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, distributions, entry_points
from importlib.util import find_spec
from types import ModuleType
from typing import Any

#: Module with a registry, which is also the entry-point group for third parties → (name of the registry, front end,
#: package of the strategies for it).
ENTRY_POINT_GROUPS = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "pytorch", "lightning_strategies_ext"),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "fabric", "lightning_strategies_ext"),
    "pytorch_lightning.strategies": ("StrategyRegistry", "pytorch", "lightning_strategies_ext.pytorch_lightning"),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "fabric", "lightning_strategies_ext.pytorch_lightning"),
}
#: Module of torch that registers the backends of process groups.
BACKENDS = "torch.distributed.distributed_c10d"

#: Releases on the package index that steal credentials when they are imported (2026-04-30).
MALICIOUS_VERSIONS = ("2.6.2", "2.6.3")
ADVISORY = "GHSA-w37p-236h-pfx3"

#: Working directory at the import of torch, usually the directory in which the user has started this process.
INITIAL_DIRECTORY = os.sep
with suppress(OSError):  # it may have been deleted
    INITIAL_DIRECTORY = os.getcwd()

_installed = False
_has_warned_of_version = False


def install() -> None:
    """Registers hooks that fill torch's and Lightning's registries when their modules are imported, or immediately.

    If a malicious release of Lightning is installed, it registers nothing and prints a warning. Repeated calls are
    no-ops. Never raises.
    """
    global _installed
    if _installed:
        return
    _installed = True
    try:
        if malicious := find_malicious_releases():
            _print_notice(f"no strategy is registered: {describe_malicious_releases(malicious)}")
            return
        from wrapt import register_post_import_hook

        register_post_import_hook(register_shm_backend, BACKENDS)
        for module_name in ENTRY_POINT_GROUPS:
            register_post_import_hook(fill_registry, module_name)
    except Exception as error:
        _print_notice(
            f"its strategies could not be registered ({type(error).__name__}: {error}). Reinstall the package."
        )


@cache
def find_malicious_releases() -> dict[str, str]:
    """Finds installed releases of Lightning that are malware, from the metadata of the distributions.

    Lightning itself is not imported, because the malware runs during the import. The search takes 0.2 ms after
    another search for metadata, such as torch's for entry points.

    Returns:
        Name of each malicious distribution → its version.
    """
    found = {}
    for name in ("lightning", "pytorch-lightning"):
        distribution = next(iter(distributions(name=name)), None)  # an import uses the first one, too
        if distribution is None:
            continue
        metadata = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        version = re.search(r"^Version:\s*(\S+)", metadata, re.MULTILINE)
        if version is not None and version[1] in MALICIOUS_VERSIONS:
            found[name] = version[1]
    return found


def describe_malicious_releases(found: dict[str, str]) -> str:
    """Returns one line that names the malicious releases, their danger, and the fix.

    Args:
        found: Result of :func:`find_malicious_releases`, not empty.
    """
    releases = " and ".join(f"{name} {version}" for name, version in found.items())
    are_malware = "is malware that steals" if len(found) == 1 else "are malware that steals"
    return (
        f"{releases} {are_malware} credentials when imported ({ADVISORY}). Run"
        f" `pip uninstall {' '.join(found)}`, revoke every credential that this machine can read, and install"
        " Lightning 2.6.4 or later."
    )


def lazy_names(
    package: str, modules: dict[str, str], further: tuple[str, ...] = (), renamed: dict[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns functions ``__getattr__`` and ``__dir__`` of a package, which import names for the Lightning in use.

    Args:
        package: Name of the package.
        modules: Exported name → module that defines it.
        further: Names that the package itself defines.
        renamed: Name in earlier versions → current name. An import of the former raises an error with the latter.
    """

    def getattr_(name: str) -> Any:
        if renamed is not None and name in renamed:  # not an AttributeError, whose message `from ... import` replaces
            raise ImportError(f"`{package}.{name}` was renamed. Use `{renamed[name]}`.")
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from lightning_strategies_ext import lightning_names

        is_mirror = package.startswith(lightning_names.MIRROR)
        if not is_mirror and (other := lightning_names.current_name()) is not lightning_names.LIGHTNING:
            return getattr(other.load(package), name)
        return getattr(lightning_names.LIGHTNING.load(modules[name]), name)

    return getattr_, lambda: sorted((*modules, *further))


def register_shm_backend(module: ModuleType) -> None:
    """Registers the backend ``shm`` with torch.distributed. Never raises."""
    try:
        from lightning_strategies_ext import shm

        shm.register(module.Backend)
    except Exception as error:
        _print_notice(
            f"the backend 'shm' could not be registered ({type(error).__name__}: {error}). Install torch 2.5 or later."
        )


def fill_registry(module: ModuleType) -> None:
    """Registers this package's strategies, then other packages', in the registry of ``module``. Never raises."""
    registry_name, front_end, package = ENTRY_POINT_GROUPS[module.__name__]
    try:
        from lightning_strategies_ext import registry

        strategies = getattr(module, registry_name)
        registry.register_all(strategies, front_end, package)
        for entry_point in _installed_entry_points().select(group=module.__name__):
            _register_third_party(strategies, entry_point)
        _check_version(module.__name__.partition(".")[0])
    except Exception as error:
        _print_notice(
            f"its strategies could not be registered in `{module.__name__}` ({type(error).__name__}: {error})."
            " Install Lightning 2.5 or 2.6."
        )


def _check_version(package: str) -> None:
    """Prints a warning for an unsupported version of Lightning, once per process.

    The package's metadata cannot require a version, because Lightning has two names.
    """
    global _has_warned_of_version
    version = str(getattr(sys.modules[package], "__version__", ""))
    if version and not version.startswith(("2.5.", "2.6.")) and not _has_warned_of_version:
        _has_warned_of_version = True
        _print_notice(
            f"this version supports Lightning 2.5 and 2.6, but {package} {version} is installed. Install a"
            " supported version."
        )


@cache
def _installed_entry_points() -> Any:
    """Returns all entry points of this environment. Cached: reading the metadata of all packages takes milliseconds."""
    return entry_points()


def _register_third_party(strategies: Any, entry_point: EntryPoint) -> None:
    """Registers one strategy of another package, whose module is imported when the name is used."""
    owner = entry_point.dist.name if entry_point.dist is not None else "an unknown package"
    try:
        top_level = entry_point.module.partition(".")[0]
        if find_spec(top_level) is None:
            raise ModuleNotFoundError(f"the module {top_level!r} is not installed")
        from lightning_strategies_ext.registry import LazyStrategy

        name = entry_point.name.lower()  # Lightning converts the user's name to lower case
        strategy = LazyStrategy(entry_point.value, owner=owner)
        if name in strategies:
            if strategies[name]["strategy"] == strategy:
                return
            raise ValueError("the name is already taken")
        strategies.register(
            name,
            strategy,
            description=f"Registered by the package {owner}",
        )
    except Exception as error:
        _print_notice(
            f"the strategy {entry_point.name!r} = {entry_point.value!r} of the package {owner} is not available:"
            f" {error}. Reinstall or uninstall that package."
        )


def _print_notice(message: str) -> None:
    # Not `warnings.warn`: under `-W error` a warning would raise in the user's `import torch`.
    print(f"lightning-strategies-ext: {message}", file=sys.stderr)  # noqa: T201
