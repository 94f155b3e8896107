"""Features that are combined: changes of the model, the Trainer, the strategy, and the data.

setup = setup_of(("accumulation", "EMA"), "ddp_ext")
trainer = make_trainer(DDPStrategy(**setup.strategy), **setup.trainer)

The reference does not use features of the strategy alone (``trains_alike``). Two features of one slot exclude each
other, for example two precisions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, StochasticWeightAveraging

from lightning_strategies_ext import ChecksOptions, CommunicationMonitor, DiLoCo, LocalSGD, PowerSGD, TopK

#: Maximum distance from the parameters of the reference. "exact": the rounding of float32. "rounded": the rounding of
#: 8-bit mantissas. "lossy": half of the distance that training covers. "summed": the whole distance, because Adasum
#: adds orthogonal components of the gradients of two ranks, up to twice their mean.
Closeness = Literal["exact", "rounded", "lossy", "summed"]
#: Strategies over torch.distributed's DDP.
DDP = frozenset(
    {
        *("ddp_ext", "ddp_spawn_ext", "ddp_fork_ext", "ddp_ray_ext"),
        *("ddp_elastic_ext", "ddp_spawn_elastic_ext", "ddp_ray_elastic_ext"),
    }
)
HOROVOD = frozenset({"horovod_ext"})
DP = frozenset({"dp_ext"})
ALL = DDP | HOROVOD | DP
#: Strategies that divide the training data among the ranks.
ELASTIC = frozenset({"ddp_elastic_ext", "ddp_spawn_elastic_ext", "ddp_ray_elastic_ext"})


@dataclass
class Setup:
    """The setup of a training run.

    Attributes:
        flags: Options of the model; see :class:`.training.Net`.
        trainer: Arguments of the Trainer.
        strategy: Arguments of the strategy.
        callbacks: Functions that create the callbacks.
        clip: Arguments of ``clip_gradients`` in manual optimization.
        lengths: Numbers of batches of rank 0 and of rank 1 per epoch.
    """

    flags: set[str] = field(default_factory=set)
    trainer: dict[str, Any] = field(default_factory=lambda: {"max_epochs": 2})
    strategy: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Callable[[], Callback]] = field(default_factory=list)
    clip: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, int] = (4, 4)


@dataclass(frozen=True)
class Feature:
    """A feature.

    Attributes:
        name: Name in the tables.
        apply: Function that changes a setup.
        strategies: Names of the strategies that have the feature.
        slot: Features of one slot exclude each other.
        closeness: See :data:`Closeness`.
        trains_alike: Whether training without the feature has the same results, so that the reference does not use it.
        named: Texts of which a message that refuses the feature must contain one.
    """

    name: str
    apply: Callable[[Setup], None]
    strategies: frozenset[str] = ALL
    slot: str = ""
    closeness: Closeness = "exact"
    trains_alike: bool = False
    named: tuple[str, ...] = ()


def _flag(*flags: str, **trainer: Any) -> Callable[[Setup], None]:
    def apply(setup: Setup) -> None:
        setup.flags.update(flags)
        setup.trainer.update(trainer)

    return apply


def _strategy(**arguments: Any) -> Callable[[Setup], None]:
    return lambda setup: setup.strategy.update(arguments)


def _callback(make: Callable[[], Callback], **trainer: Any) -> Callable[[Setup], None]:
    def apply(setup: Setup) -> None:
        setup.callbacks.append(make)
        setup.trainer.update(trainer)

    return apply


def _uneven(mode: str, lengths: tuple[int, int]) -> Callable[[Setup], None]:
    def apply(setup: Setup) -> None:
        setup.strategy["uneven_inputs"] = mode
        setup.lengths = lengths
        setup.flags.add(f"uneven {mode}")

    return apply


def _checks(*flags: str, **fields: Any) -> Callable[[Setup], None]:
    def apply(setup: Setup) -> None:
        setup.flags.update(flags)
        setup.strategy["checks"] = replace(setup.strategy.get("checks", ChecksOptions()), **fields)

    return apply


def _exact_evaluation(setup: Setup) -> None:
    setup.flags.add("odd evaluation")
    setup.strategy["exact_evaluation"] = True


def _lbfgs(setup: Setup) -> None:
    """Selects LBFGS with float64, because it amplifies the rounding of float32 beyond the limit of "exact"."""
    setup.flags.add("lbfgs")
    setup.trainer.setdefault("precision", "64-true")


def _compression(name: str, value: Any, closeness: Closeness, named: str) -> Feature:
    apply = _strategy(compression=value)
    return Feature(f"compression {name}", apply, DDP, "exchange", closeness, True, (named, f"compression={name!r}"))


FEATURES = (
    Feature("accumulation", _flag("accumulation"), named=("accumulat",)),
    Feature(
        "manual optimization",
        _flag("manual"),
        named=("manual optimization", "automatic_optimization=False"),
        slot="optimization",
    ),
    Feature(
        "two optimizers",
        _flag("manual", "two"),
        named=("several optimizers", "manual optim", "automatic_optimization=False"),
        slot="optimization",
    ),
    Feature(
        "alternating optimizers",
        _flag("manual", "two", "alternating"),
        named=("several optimizers", "manual optim", "find_unused_parameters", "automatic_optimization=False"),
        slot="optimization",
    ),
    Feature(
        "static graph", _strategy(static_graph=True), DDP, slot="graph", trains_alike=True, named=("static_graph",)
    ),
    Feature(
        "unused parameters",
        lambda setup: (setup.flags.add("unused"), setup.strategy.update(find_unused_parameters=True))[0],
        named=("find_unused_parameters",),
    ),
    Feature("no bucket views", _strategy(gradient_as_bucket_view=False), DDP, trains_alike=True),
    Feature("buckets by trial", _strategy(bucket_cap_mb="auto"), DDP, trains_alike=True, named=("bucket_cap_mb",)),
    _compression("bf16", "bf16", "rounded", "BFloat16"),
    _compression("fp16", "fp16", "rounded", "Float16"),
    _compression("powersgd", PowerSGD(rank=2, warmup_steps=1), "lossy", "PowerSGD"),
    _compression("topk", TopK(fraction=1.0, warmup_steps=0), "exact", "TopK"),
    _compression("localsgd", LocalSGD(period=2), "lossy", "LocalSGD"),
    _compression("diloco", DiLoCo(period=2, learning_rate=1.0, momentum=0.2), "lossy", "DiLoCo"),
    Feature(
        "uneven inputs: stop", _uneven("stop", (6, 4)), DDP - ELASTIC | HOROVOD, "data length", named=("uneven_inputs",)
    ),
    Feature(
        "uneven inputs: join", _uneven("join", (6, 4)), DDP - ELASTIC | HOROVOD, "data length", named=("uneven_inputs",)
    ),
    Feature(
        "missing loss: skip",
        _checks("missing loss", missing_loss="skip"),
        DDP | HOROVOD,
        named=("missing_loss='skip'",),
    ),
    Feature(
        "NaN loss: skip",
        _checks("nan loss", nonfinite_loss="skip"),
        DDP | HOROVOD,
        "NaN loss",
        named=("nonfinite_loss='skip'",),
    ),
    Feature(
        "NaN loss: error",
        _checks(nonfinite_loss="error"),
        DDP | HOROVOD,
        "NaN loss",
        trains_alike=True,
        named=("nonfinite_loss='error'",),
    ),
    Feature("exact evaluation", _exact_evaluation, DDP | HOROVOD, named=("exact_evaluation=True",)),
    Feature(
        "compared collectives",
        _checks(check_collectives=True),
        DDP | HOROVOD,
        trains_alike=True,
        named=("check_collectives",),
    ),
    Feature("monitor", _callback(CommunicationMonitor), trains_alike=True, named=("CommunicationMonitor",)),
    Feature("SyncBatchNorm", _flag("batch norm", sync_batchnorm=True), named=("sync_batchnorm",)),
    Feature("clipping by norm", _flag(gradient_clip_val=0.3), slot="clipping", named=("clip",)),
    Feature(
        "clipping by value",
        _flag(gradient_clip_val=0.02, gradient_clip_algorithm="value"),
        slot="clipping",
        named=("clip",),
    ),
    Feature("bf16-mixed", _flag(precision="bf16-mixed"), slot="precision", closeness="rounded", named=("precision",)),
    Feature("bf16-true", _flag(precision="bf16-true"), slot="precision", closeness="lossy", named=("precision",)),
    Feature("64-true", _flag(precision="64-true"), slot="precision", named=("precision",)),
    Feature(
        "EMA", _callback(lambda: callbacks.EMAWeightAveraging(decay=0.5)), slot="average", named=("EMAWeightAveraging",)
    ),
    Feature(
        "SWA",
        _callback(lambda: StochasticWeightAveraging(0.05, 1, annealing_epochs=1), max_epochs=3),
        slot="average",
        named=("StochasticWeightAveraging",),
    ),
    Feature("compiled module", _flag("compiled"), slot="compile", trains_alike=True, named=("torch.compile",)),
    Feature("compiled submodule", _flag("compiled part"), slot="compile", trains_alike=True),
    Feature("checkpointed activations", _flag("checkpointed"), trains_alike=True),
    Feature("unfreezing", _callback(lambda: BackboneFinetuning(1)), named=("Other parameters", "BackboneFinetuning")),
    Feature("resume", _flag("resume"), named=("ckpt_path",)),
    Feature("LBFGS", _lbfgs, named=("LBFGS",)),
    Feature("schedulers", _flag("scheduler"), named=("scheduler",)),
    Feature("CombinedLoader", _flag("combined"), named=("CombinedLoader",)),
    Feature("iterable data", _flag("iterable"), named=("IterableDataset",)),
    Feature("several stages", _flag("stages")),
    Feature("sparse embedding", _flag("sparse"), named=("sparse",)),
    Feature("replicas at once", _strategy(sequential=False), DP, trains_alike=True),
    Feature("Horovod: fp16", _strategy(compression="fp16"), HOROVOD, "exchange", "rounded", True, ("compression",)),
    Feature("Horovod: adasum", _strategy(op="adasum"), HOROVOD, "exchange", "summed", True, ("adasum",)),
    Feature("Horovod: groups", _strategy(num_groups=2), HOROVOD, trains_alike=True, named=("num_groups",)),
    Feature("Horovod: buffers", _strategy(broadcast_buffers=True), HOROVOD, trains_alike=True),
    Feature(
        "Horovod: predivide",
        _strategy(gradient_predivide_factor=2.0),
        HOROVOD,
        trains_alike=True,
        named=("gradient_predivide_factor",),
    ),
)
#: Features that a Fabric loop supports, too.
UNDER_FABRIC = frozenset(
    {
        *("accumulation", "two optimizers", "static graph", "unused parameters", "no bucket views"),
        *("buckets by trial", "compression bf16", "compression fp16", "compression powersgd"),
        *("clipping by norm", "clipping by value", "bf16-mixed", "bf16-true", "64-true"),
        *("compiled module", "compiled submodule", "checkpointed activations", "LBFGS", "schedulers"),
        *("sparse embedding", "iterable data", "replicas at once"),
        *("Horovod: fp16", "Horovod: adasum", "Horovod: groups", "Horovod: buffers", "Horovod: predivide"),
    }
)
BY_NAME = {feature.name: feature for feature in FEATURES}


def setup_of(names: tuple[str, ...], strategy: str) -> Setup:
    """Returns the setup of a cell for a strategy; for "one device", without arguments of a strategy."""
    setup = Setup()
    for name in names:
        BY_NAME[name].apply(setup)
    if strategy not in DDP | {"ddp", "fabric ddp_ext"}:
        setup.strategy.pop("find_unused_parameters", None)
    elif "alternating" in setup.flags:
        setup.strategy["find_unused_parameters"] = True
    if "static graph" in names:
        setup.flags.add("static")
    if "accumulation" in setup.flags and "manual" not in setup.flags:
        setup.trainer["accumulate_grad_batches"] = 2
    if "manual" in setup.flags:  # the manual step clips gradients
        setup.clip = {name: setup.trainer.pop(name) for name in list(setup.trainer) if name.startswith("gradient_clip")}
    return setup


def pairs(strategy: str) -> list[tuple[str, ...]]:
    """Returns the cells of a strategy: no feature, each feature alone, and each pair."""
    is_fabric, name = strategy.startswith("fabric "), strategy.removeprefix("fabric ")
    of_strategy = [
        feature
        for feature in FEATURES
        if name in feature.strategies and (not is_fabric or feature.name in UNDER_FABRIC)
    ]
    cells: list[tuple[str, ...]] = [(), *((feature.name,) for feature in of_strategy)]
    for number, first in enumerate(of_strategy):
        cells += [
            (first.name, second.name)
            for second in of_strategy[number + 1 :]
            if not first.slot or first.slot != second.slot
        ]
    return cells


def closeness_of(names: tuple[str, ...]) -> Closeness:
    """Returns the closeness of a cell: the weakest closeness of its features."""
    found = {BY_NAME[name].closeness for name in names}
    return next((closeness for closeness in ("summed", "lossy", "rounded") if closeness in found), "exact")  # type: ignore[return-value]


def reference_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the cell that one device trains as the reference: without features that train alike."""
    if {"static graph", "unused parameters"} <= set(names):  # the model then leaves the same parameters unused
        return names
    return tuple(name for name in names if not BY_NAME[name].trains_alike)
