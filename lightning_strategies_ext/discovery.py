"""Makes the strategy names known to Lightning, with no import in the user's script.

torch has :func:`install` called at the end of ``import torch`` (entry-point group ``torch.backends``, torch 2.5 and
later; see :mod:`lightning_strategies_ext.autoload`).
It only tells torch.distributed the name of a backend, and leaves a note for the import system: when Lightning's
strategy registries come to life, fill them. So a process that never imports Lightning pays for some dictionary entries.

Names of a package whose modules load when they are first asked for are in here too (``lazy_names``): each further
module would take a quarter of a millisecond of every ``import torch``.

What this module promises: it never makes ``import torch`` or ``import lightning`` fail. Whatever goes wrong is said
once on standard error. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` switches torch's call off; then ``import
lightning_strategies_ext`` registers the names.

Other packages can offer strategies the same way, through entry-point groups of ours (see :data:`GROUPS`)::

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

#: Module that holds a registry, which is also our entry-point group for third parties → (name of the registry, front
#: end, package of our strategies for it).
GROUPS = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "pytorch", "lightning_strategies_ext"),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "fabric", "lightning_strategies_ext"),
    "pytorch_lightning.strategies": ("StrategyRegistry", "pytorch", "lightning_strategies_ext.pytorch_lightning"),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "fabric", "lightning_strategies_ext.pytorch_lightning"),
}
#: Module of torch's that knows the backends of process groups.
BACKENDS = "torch.distributed.distributed_c10d"

#: Releases on the package index that steal credentials as soon as they are imported (2026-04-30).
MALICIOUS_VERSIONS = ("2.6.2", "2.6.3")
ADVISORY = "GHSA-w37p-236h-pfx3"

#: The working directory at the import of torch, which is usually that in which the user has started this process.
INITIAL_DIRECTORY = os.sep
with suppress(OSError):  # it may have been deleted
    INITIAL_DIRECTORY = os.getcwd()

_installed = False


def install() -> None:
    """Arranges that torch's and Lightning's registries are filled when their modules are imported (or at once).

    Registers nothing, and prints a warning, if a malicious release of Lightning is installed. Calling it again does
    nothing. Never raises.
    """
    global _installed
    if _installed:
        return
    _installed = True
    try:
        if malicious := find_malicious_releases():
            _say(f"no strategy is registered: {describe_malicious_releases(malicious)}")
            return
        from wrapt import register_post_import_hook

        register_post_import_hook(name_backend, BACKENDS)
        for module_name in GROUPS:
            register_post_import_hook(fill_registry, module_name)
    except Exception as error:
        _say(f"its strategies could not be registered ({type(error).__name__}: {error}).")


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
    package: str, modules: dict[str, str], further: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions ``__getattr__`` and ``__dir__`` of a package; they give what is for the Lightning in use.

    Args:
        package: Its name.
        modules: The names that it offers, and the module where each stands.
        further: Names that it defines itself.
    """

    def getattr_(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from lightning_strategies_ext import names

        is_twin = package.startswith(names.TWIN)
        if not is_twin and (other := names.in_use(sys._getframe(1))) is not names.LIGHTNING:
            return getattr(other.load(package), name)
        return getattr(names.LIGHTNING.load(modules[name]), name)

    return getattr_, lambda: sorted((*modules, *further))


def name_backend(module: ModuleType) -> None:
    """Tells torch.distributed of our process group. Never raises."""
    try:
        from lightning_strategies_ext import shm

        shm.register(module.Backend)
    except Exception as error:
        _say(f"the backend 'shm' could not be registered ({type(error).__name__}: {error}).")


def fill_registry(module: ModuleType) -> None:
    """Registers our names, then those of other packages, in the registry that ``module`` holds. Never raises."""
    registry_name, front_end, package = GROUPS[module.__name__]
    try:
        from lightning_strategies_ext import registry

        strategies = getattr(module, registry_name)
        registry.register_all(strategies, front_end, package)
        for entry_point in _installed_entry_points().select(group=module.__name__):
            _register_third_party(strategies, entry_point)
        _check_version(module.__name__.partition(".")[0])
    except Exception as error:
        _say(f"its strategies could not be registered in `{module.__name__}` ({type(error).__name__}: {error}).")


def _check_version(package: str) -> None:
    """Says so if this Lightning is not one that the package was made for: pip is told of none, as there are two."""
    version = str(getattr(sys.modules[package], "__version__", ""))
    if version and not version.startswith(("2.5.", "2.6.")):
        _say(f"it was made for Lightning 2.5 and 2.6, and this is {package} {version}. Install one of these.")


@cache
def _installed_entry_points() -> Any:
    """All entry points of this environment. Read once: it takes milliseconds, for the metadata of every package."""
    return entry_points()


def _register_third_party(strategies: Any, entry_point: EntryPoint) -> None:
    """Registers one strategy of another package, unloaded: its module is imported when the name is used."""
    owner = entry_point.dist.name if entry_point.dist is not None else "an unknown package"
    try:
        top_level = entry_point.module.partition(".")[0]
        if find_spec(top_level) is None:
            raise ModuleNotFoundError(f"there is no module {top_level!r}")
        from lightning_strategies_ext.registry import LazyStrategy

        name = entry_point.name.lower()  # Lightning lowers what the user gives before it looks it up
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
        _say(
            f"the strategy {entry_point.name!r} = {entry_point.value!r} of the package {owner} is not available:"
            f" {error}."
        )


def _say(message: str) -> None:
    # Not `warnings.warn`: under `-W error` a warning would be an exception inside somebody's `import torch`.
    print(f"lightning-strategies-ext: {message}", file=sys.stderr)  # noqa: T201
