"""Table of strategy names, with the class and the front ends of each name.

:data:`STRATEGIES` is the table; the rest of this module adds its rows to Lightning's registries. The class of a row is
imported when the name is used.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from lightning_strategies_ext.lightning_names import (
    LIGHTNING,
    PACKAGE,
    PYTORCH_LIGHTNING,
    LightningName,
    name_for_module,
)


class StrategyUnavailableError(RuntimeError):
    """An optional requirement of a strategy is missing on this system; not an error of the installation."""


class EngineNotInstalledError(StrategyUnavailableError):
    """The engine of a strategy is not installed."""


PYTORCH = "pytorch"
FABRIC = "fabric"

_DDP_CLASS = {
    PYTORCH: "lightning_strategies_ext.pytorch.ddp:DDPStrategy",
    FABRIC: "lightning_strategies_ext.fabric.ddp:DDPStrategy",
}
_DP_CLASS = {
    PYTORCH: "lightning_strategies_ext.pytorch.dp:DataParallelStrategy",
    FABRIC: "lightning_strategies_ext.fabric.dp:DataParallelStrategy",
}
_HOROVOD_CLASS = {
    PYTORCH: "lightning_strategies_ext.pytorch.horovod:HorovodStrategy",
    FABRIC: "lightning_strategies_ext.fabric.horovod:HorovodStrategy",
}
#: Name of a compression → front ends of the strategies with it, and its description for users.
COMPRESSIONS = {
    "bf16": ((PYTORCH, FABRIC), "gradients exchanged in bfloat16"),
    "fp16": ((PYTORCH, FABRIC), "gradients exchanged in float16"),
    "powersgd": ((PYTORCH,), "low-rank approximations of gradients exchanged"),
    "topk": ((PYTORCH,), "only the largest gradients exchanged"),
    "localsgd": ((PYTORCH,), "models averaged every 32 steps"),
    "diloco": ((PYTORCH,), "outer optimizer step every 32 steps"),
}

_SPAWN_CLASS = {**_DDP_CLASS, PYTORCH: "lightning_strategies_ext.pytorch.ddp_spawn:DDPSpawnStrategy"}


@dataclass(frozen=True)
class StrategyEntry:
    """One row: a name that ``Trainer(strategy=...)`` and ``Fabric(strategy=...)`` accept.

    Attributes:
        name: Name in lower case, to which Lightning converts the user's argument.
        classes: Front end (``"pytorch"``, ``"fabric"``) → ``"module:Class"``.
        engine: Engine of the collectives.
        description: One line for users.
        init_params: Keyword arguments of the constructor.
    """

    name: str
    classes: dict[str, str]
    engine: str
    description: str
    init_params: dict[str, Any] = field(default_factory=dict)


def _ddp_family() -> Iterator[StrategyEntry]:
    for base, classes, start_method, processes in (
        ("ddp_ext", _DDP_CLASS, "popen", "one process per device, each of which runs the script"),
        ("ddp_spawn_ext", _SPAWN_CLASS, "forkserver", "worker processes, results returned"),
        ("ddp_fork_ext", _SPAWN_CLASS, "fork", "forked worker processes, results returned"),
        ("ddp_notebook_ext", _SPAWN_CLASS, "fork", "worker processes forked from a notebook, results returned"),
    ):
        init_params: dict[str, Any] = {"start_method": start_method}
        yield StrategyEntry(base, classes, "torch.distributed", f"DDP in {processes}", init_params)
        for value in (True, False):
            yield StrategyEntry(
                f"{base}_find_unused_parameters_{str(value).lower()}",
                classes,
                "torch.distributed",
                f"DDP in {processes}, find_unused_parameters={value}",
                {**init_params, "find_unused_parameters": value},
            )
        if base in ("ddp_ext", "ddp_spawn_ext"):
            for compression, (front_ends, detail) in COMPRESSIONS.items():
                yield StrategyEntry(
                    f"{base}_{compression}",
                    {front_end: classes[front_end] for front_end in front_ends},
                    "torch.distributed",
                    f"DDP in {processes}, {detail}",
                    {**init_params, "compression": compression},
                )


#: All strategies. The names that Lightning 2 has dropped are last, and only for the front end without such a strategy.
STRATEGIES: tuple[StrategyEntry, ...] = (
    *_ddp_family(),
    StrategyEntry(
        "ddp_spawn_elastic_ext",
        {PYTORCH: "lightning_strategies_ext.pytorch.ddp_spawn_elastic:DDPSpawnElasticStrategy"},
        "torch.distributed",
        "elastic DDP in worker processes; a worker that exits during fit is replaced",
        {"start_method": "forkserver"},
    ),
    StrategyEntry(
        "ddp_ray_ext",
        {PYTORCH: "lightning_strategies_ext.pytorch.ddp_ray:DDPRayStrategy"},
        "torch.distributed",
        "DDP in workers on a Ray cluster, results returned",
    ),
    StrategyEntry(
        "ddp_ray_elastic_ext",
        {PYTORCH: "lightning_strategies_ext.pytorch.ddp_ray_elastic:DDPRayElasticStrategy"},
        "torch.distributed",
        "elastic DDP in workers on a Ray cluster; a lost worker or host is replaced during fit",
    ),
    StrategyEntry(
        "ddp_elastic_ext",
        {PYTORCH: "lightning_strategies_ext.pytorch.ddp_elastic:DDPElasticStrategy"},
        "torch.distributed",
        "elastic DDP under torchrun; fit continues from memory after torchrun has restarted the ranks",
    ),
    StrategyEntry("dp_ext", _DP_CLASS, "threads", "DP in one process, with a replica of the module on each device"),
    StrategyEntry(
        "horovod_ext",
        _HOROVOD_CLASS,
        "Horovod",
        "DDP over Horovod, started by horovodrun, by mpirun, or by the strategy",
    ),
    StrategyEntry(
        "horovod_elastic_ext",
        {PYTORCH: "lightning_strategies_ext.pytorch.horovod_elastic:HorovodElasticStrategy"},
        "Horovod",
        "elastic DDP over Horovod, under horovodrun with a discovery script",
    ),
    StrategyEntry(
        "dp",
        {PYTORCH: "lightning_strategies_ext.pytorch.dp:legacy_dp"},
        "threads",
        "the name of `dp_ext` in Lightning 1",
    ),
    StrategyEntry(
        "horovod",
        {PYTORCH: "lightning_strategies_ext.pytorch.legacy_horovod:legacy_horovod"},
        "Horovod",
        "the name of `horovod_ext` in Lightning 1",
    ),
)


#: Front end → its name in messages, and the subpackage from which its classes are imported.
_FRONT_ENDS = {PYTORCH: ("the Trainer", ""), FABRIC: ("Fabric", ".fabric")}


def _register(cls: type, strategy_registry: Any) -> None:
    """Registers this class under its names, for code that fills another registry."""
    for row in STRATEGIES:
        if _path_for_lightning(cls) in row.classes.values() and row.name not in strategy_registry:
            strategy_registry.register(row.name, cls, description=row.description, **row.init_params)


#: Class method of strategies that registers a class under its names.
register_strategies: Any = classmethod(_register)


def describe(strategy: object) -> str:
    """Returns a representation with the code for the other front end and for the other name of Lightning.

    A front end rejects strategies of another front end with a message that quotes their representation, before it
    calls any of their methods.
    """
    for kind in type(strategy).__mro__:
        for row in STRATEGIES:
            for front_end in _FRONT_ENDS:
                if row.classes.get(front_end) == _path_for_lightning(kind):
                    text = _describe_class(row, front_end, name_for_module(kind.__module__))
                    return f"{object.__repr__(strategy)[:-1]}, {text}>"
    return object.__repr__(strategy)


def name_with(strategy_class: type, **init_params: Any) -> str | None:
    """Returns the name in the table of a class with the given constructor arguments, or None."""
    path = _path_for_lightning(strategy_class)
    rows = (row for row in STRATEGIES if path in row.classes.values() and row.init_params == init_params)
    return next((row.name for row in rows), None)


def _path_for_lightning(strategy_class: type) -> str:
    """Returns ``"module:Class"`` of a class or, for a class of `pytorch_lightning`, of its counterpart."""
    module = strategy_class.__module__
    return f"{PACKAGE}{module.removeprefix(name_for_module(module).package_for_it)}:{strategy_class.__qualname__}"


def _describe_class(row: StrategyEntry, own_front_end: str, name: LightningName) -> str:
    """Returns the front end of a class, and the code for the other front ends that this process can use."""
    arguments = ", ".join(f"{key}={value!r}" for key, value in row.init_params.items())
    names = [name, *(other for other in (LIGHTNING, PYTORCH_LIGHTNING) if other is not name and other.is_imported())]
    package_of = {name: f" of `{name.package}`" if len(names) > 1 else "" for name in names}
    sentences = [f"for {_FRONT_ENDS[own_front_end][0]}{package_of[name]}."]
    for other in names:
        for front_end, (front_end_text, source) in _FRONT_ENDS.items():
            if front_end in row.classes and (front_end, other) != (own_front_end, name):
                kind = row.classes[front_end].rpartition(":")[2]
                sentences.append(
                    f"For {front_end_text}{package_of[other]}: from {other.package_for_it}{source} import {kind};"
                    f" {kind}({arguments})"
                )
    return " ".join(sentences)


@dataclass(frozen=True)
class LazyStrategy:
    """Placeholder for a strategy class in a registry, which imports the class when it is called.

    Lightning's registries accept any callable. The late import keeps ``import lightning`` as fast as without this
    package, and a broken package affects only scripts that use its strategy.

    Attributes:
        target: Strategy class or factory, as ``"module:Class"``.
        owner: Name of the package that provides it.
    """

    target: str
    owner: str = "lightning-strategies-ext"

    def load(self) -> Callable[..., Any]:
        """Returns the class or factory.

        Raises:
            ImportError: If the import fails; the message contains the name of the package.
        """
        module_name, _, attribute = self.target.partition(":")
        try:
            loaded: Any = import_module(module_name)
            for part in attribute.split("."):
                loaded = getattr(loaded, part)
        except Exception as error:
            raise ImportError(
                f"The strategy {self.target!r} of the package {self.owner} cannot be loaded"
                f" ({type(error).__name__}: {error}). Repair or uninstall that package, or choose another strategy."
            ) from error
        return loaded  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Imports the class and constructs the strategy."""
        return self.load()(*args, **kwargs)

    def __repr__(self) -> str:
        return f"LazyStrategy({self.target!r})"


def register_all(strategies: Any, front_end: str, package: str = PACKAGE) -> None:
    """Adds to a registry of Lightning every row with a class for ``front_end``, except names that are taken.

    Args:
        strategies: ``lightning.pytorch.strategies.StrategyRegistry`` or
            ``lightning.fabric.strategies.STRATEGY_REGISTRY``.
        front_end: ``"pytorch"`` or ``"fabric"``.
        package: Package of the strategies for this name of Lightning.
    """
    for row in STRATEGIES:
        target = row.classes.get(front_end)
        if target is not None and row.name not in strategies:
            strategy = LazyStrategy(package + target.removeprefix(PACKAGE))
            strategies.register(row.name, strategy, description=row.description, **row.init_params)


def __getattr__(name: str) -> Any:
    if name == "UnavailableHereError":  # not an AttributeError, whose message `from ... import` replaces
        raise ImportError(f"`{__name__}.{name}` was renamed. Use `StrategyUnavailableError`.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
