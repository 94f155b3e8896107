"""Says which strategies are registered and which of them can run in this environment."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lightning_strategies_ext.discovery import GROUPS
from lightning_strategies_ext.registry import STRATEGIES, LazyStrategy, UnavailableHereError


@dataclass(frozen=True)
class Finding:
    """What the doctor found out about one name.

    Attributes:
        name: The strategy's name.
        front_ends: Where it is registered: "Trainer", "Fabric".
        engine: What carries its collectives.
        problem: Why it cannot run here, or None.
        is_fault: Whether something is wrong; that something is not here which not everybody needs is not.
    """

    name: str
    front_ends: tuple[str, ...]
    engine: str
    problem: str | None
    is_fault: bool = False


def examine() -> Iterator[Finding]:
    """Examines every name that this package, or another one through our entry points, has registered."""
    registered: dict[str, dict[str, Any]] = {}
    for module_name, (registry_name, _) in GROUPS.items():
        front_end = "Trainer" if ".pytorch." in module_name else "Fabric"
        for name, entry in getattr(import_module(module_name), registry_name).items():
            if isinstance(entry["strategy"], LazyStrategy):
                registered.setdefault(name, {})[front_end] = entry
    engines = {row.name: row.engine for row in STRATEGIES}
    for name, entries in registered.items():
        problem = next((found for entry in entries.values() if (found := _problem(entry))), None)
        owner = next(iter(entries.values()))["strategy"].owner
        is_fault = problem is not None and not isinstance(problem, UnavailableHereError)
        message = None if problem is None else str(problem)
        yield Finding(name, tuple(entries), engines.get(name, f"(package {owner})"), message, is_fault)
    for name in sorted(engines.keys() - registered.keys()):
        message = "not registered: another package took the name, or discovery failed"
        yield Finding(name, (), engines[name], message, is_fault=True)


def _problem(entry: dict[str, Any]) -> Exception | None:
    """Constructs the strategy as Lightning would; what it refuses is what the user would meet."""
    try:
        entry["strategy"](**entry["init_params"])
    except Exception as error:
        return error
    return None
