"""THE table of strategy names: what each one is, and in which front end it is found.

To see what a name does, find its row in :data:`STRATEGIES`; the rest of this module puts the rows into Lightning's
registries. Nothing here imports a strategy: the class behind a row loads when the name is used.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from lightning_strategies_ext.names import LIGHTNING, PACKAGE, PYTORCH_LIGHTNING, Name, name_of


class UnavailableHereError(RuntimeError):
    """What a strategy needs is not here, which is no fault: not everybody needs it."""


class EngineNotInstalledError(UnavailableHereError):
    """What carries a strategy's collectives is not installed."""


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
#: Name of a compression → where there is a strategy with it, and what it is, for people.
COMPRESSIONS = {
    "bf16": ((PYTORCH, FABRIC), "gradients exchanged in bfloat16"),
    "fp16": ((PYTORCH, FABRIC), "gradients exchanged in float16"),
    "powersgd": ((PYTORCH,), "gradients exchanged as products of thin matrices"),
    "topk": ((PYTORCH,), "the largest gradients exchanged"),
    "localsgd": ((PYTORCH,), "models averaged every 32 steps"),
    "diloco": ((PYTORCH,), "models moved on together every 32 steps"),
}

_SPAWN_CLASS = {**_DDP_CLASS, PYTORCH: "lightning_strategies_ext.pytorch.ddp_spawn:DDPSpawnStrategy"}


@dataclass(frozen=True)
class NamedStrategy:
    """One row: a name that ``Trainer(strategy=...)`` and ``Fabric(strategy=...)`` accept.

    Attributes:
        name: What the user writes. Lower case, since Lightning lowers what it is given.
        classes: Front end (``"pytorch"``, ``"fabric"``) → ``"module:Class"``.
        engine: What carries the collectives.
        description: One line for people.
        init_params: Keyword arguments the class is constructed with.
    """

    name: str
    classes: dict[str, str]
    engine: str
    description: str
    init_params: dict[str, Any] = field(default_factory=dict)


def _ddp_family() -> Iterator[NamedStrategy]:
    for base, classes, start_method, how in (
        ("ddp_ext", _DDP_CLASS, "popen", "one process per device, each runs the script"),
        ("ddp_spawn_ext", _SPAWN_CLASS, "forkserver", "worker processes, everything comes back"),
        ("ddp_fork_ext", _SPAWN_CLASS, "fork", "worker processes, forked"),
        ("ddp_notebook_ext", _SPAWN_CLASS, "fork", "worker processes, forked from a notebook"),
    ):
        init_params: dict[str, Any] = {"start_method": start_method}
        yield NamedStrategy(base, classes, "torch.distributed", f"DDP, {how}", init_params)
        for value in (True, False):
            yield NamedStrategy(
                f"{base}_find_unused_parameters_{str(value).lower()}",
                classes,
                "torch.distributed",
                f"DDP, {how}, find_unused_parameters={value}",
                {**init_params, "find_unused_parameters": value},
            )
        if base in ("ddp_ext", "ddp_spawn_ext"):
            for compression, (faces, what) in COMPRESSIONS.items():
                yield NamedStrategy(
                    f"{base}_{compression}",
                    {face: classes[face] for face in faces},
                    "torch.distributed",
                    f"DDP, {how}, {what}",
                    {**init_params, "compression": compression},
                )


#: The names that Lightning 2 has dropped stand last, and in the front end only that has no strategy of that name.
STRATEGIES: tuple[NamedStrategy, ...] = (
    *_ddp_family(),
    NamedStrategy(
        "ddp_spawn_elastic_ext",
        {PYTORCH: "lightning_strategies_ext.pytorch.ddp_spawn_elastic:DDPSpawnElasticStrategy"},
        "torch.distributed",
        "DDP, worker processes, of which one may die in fit and is started anew",
        {"start_method": "forkserver"},
    ),
    NamedStrategy(
        "ddp_ray_ext",
        {PYTORCH: "lightning_strategies_ext.pytorch.ddp_ray:DDPRayStrategy"},
        "torch.distributed",
        "DDP, workers on a Ray cluster, everything comes back",
    ),
    NamedStrategy(
        "ddp_ray_elastic_ext",
        {PYTORCH: "lightning_strategies_ext.pytorch.ddp_ray_elastic:DDPRayElasticStrategy"},
        "torch.distributed",
        "the same, of which one may be lost in fit, with its host, and Ray starts another",
    ),
    NamedStrategy(
        "ddp_elastic_ext",
        {PYTORCH: "lightning_strategies_ext.pytorch.ddp_elastic:DDPElasticStrategy"},
        "torch.distributed",
        "DDP whose fit goes on from memory when torchrun starts its ranks anew",
    ),
    NamedStrategy("dp_ext", _DP_CLASS, "threads", "DP, one process, a replica of the module on each device"),
    NamedStrategy("horovod_ext", _HOROVOD_CLASS, "Horovod", "DDP over Horovod, under horovodrun, mpirun or by itself"),
    NamedStrategy(
        "horovod_elastic_ext",
        {PYTORCH: "lightning_strategies_ext.pytorch.horovod_elastic:HorovodElasticStrategy"},
        "Horovod",
        "the same, of ranks that come and go, under horovodrun with a discovery script",
    ),
    NamedStrategy(
        "dp",
        {PYTORCH: "lightning_strategies_ext.pytorch.dp:legacy_dp"},
        "threads",
        "what Lightning 1 called so: `dp_ext`",
    ),
    NamedStrategy(
        "horovod",
        {PYTORCH: "lightning_strategies_ext.pytorch.horovod:legacy_horovod"},
        "Horovod",
        "what Lightning 1 called so: `horovod_ext`",
    ),
)


#: Front end → what it is called, and what classes for it are imported from, in the package for a name of Lightning.
_FACES = {PYTORCH: ("the Trainer", ""), FABRIC: ("Fabric", ".fabric")}


class Registered:
    """What every strategy of the table has; stands before Lightning's class among its bases."""

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers this class under its names, for code that fills a registry of its own."""
        for row in STRATEGIES:
            if _path_for_lightning(cls) in row.classes.values() and row.name not in strategy_registry:
                strategy_registry.register(row.name, cls, description=row.description, **row.init_params)

    def __repr__(self) -> str:
        """Says also what to write for the other front end, and for the other name of Lightning.

        A front end refuses the others' strategies with a message that quotes them, before it calls anything of theirs.
        """
        for kind in type(self).__mro__:
            for row in STRATEGIES:
                for here in _FACES:
                    if row.classes.get(here) == _path_for_lightning(kind):
                        return f"{object.__repr__(self)[:-1]}, {_whose(row, here, name_of(kind.__module__))}>"
        return object.__repr__(self)


def name_with(strategy_class: type, **init_params: Any) -> str | None:
    """The name in the table of a class with the given arguments of its constructor; None if there is none."""
    path = _path_for_lightning(strategy_class)
    rows = (row for row in STRATEGIES if path in row.classes.values() and row.init_params == init_params)
    return next((row.name for row in rows), None)


def _path_for_lightning(strategy_class: type) -> str:
    """``"module:Class"`` of a class, or of that for the other name of Lightning."""
    module = strategy_class.__module__
    return f"{PACKAGE}{module.removeprefix(name_of(module).ours)}:{strategy_class.__qualname__}"


def _whose(row: NamedStrategy, here: str, name: Name) -> str:
    """For whom a class is, and how to get those for others that there are in this process."""
    arguments = ", ".join(f"{key}={value!r}" for key, value in row.init_params.items())
    names = [name, *(other for other in (LIGHTNING, PYTORCH_LIGHTNING) if other is not name and other.is_imported())]
    told = {name: f" of `{name.package}`" if len(names) > 1 else "" for name in names}
    said = [f"for {_FACES[here][0]}{told[name]}."]
    for other in names:
        for there, (front_end, source) in _FACES.items():
            if there in row.classes and (there, other) != (here, name):
                kind = row.classes[there].rpartition(":")[2]
                said.append(
                    f"For {front_end}{told[other]}: from {other.ours}{source} import {kind}; {kind}({arguments})"
                )
    return " ".join(said)


@dataclass(frozen=True)
class LazyStrategy:
    """Stands for a strategy class in a registry and loads it when it is called.

    Lightning's registries accept any callable. Loading late keeps ``import lightning`` as fast as without us, and a
    package that is broken breaks only the script that asked for it.

    Attributes:
        target: ``"module:Class"``.
        owner: The package it belongs to.
    """

    target: str
    owner: str = "lightning-strategies-ext"

    def load(self) -> Callable[..., Any]:
        """Returns the class (or factory).

        Raises:
            ImportError: If it cannot be imported; the message names the package it belongs to.
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
        """Loads the class and constructs it."""
        return self.load()(*args, **kwargs)

    def __repr__(self) -> str:
        return f"LazyStrategy({self.target!r})"


def register_all(strategies: Any, front_end: str, package: str = PACKAGE) -> None:
    """Puts every row that ``front_end`` has a class for, and that is not there yet, into a registry of Lightning's.

    Args:
        strategies: ``lightning.pytorch.strategies.StrategyRegistry`` or
            ``lightning.fabric.strategies.STRATEGY_REGISTRY``.
        front_end: ``"pytorch"`` or ``"fabric"``.
        package: That of our strategies for the name that Lightning has here.
    """
    for row in STRATEGIES:
        target = row.classes.get(front_end)
        if target is not None and row.name not in strategies:
            strategy = LazyStrategy(package + target.removeprefix(PACKAGE))
            strategies.register(row.name, strategy, description=row.description, **row.init_params)
