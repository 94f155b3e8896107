"""Random cases: a model, its training, and the stages that a Trainer runs. A seed and a strategy make one case.

case = draw("ddp_ext", seed=17)
for simpler in simplifications(case): ...  # one drawn choice each, nearer to its simplest value
"""

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

STRATEGIES = ("ddp_ext", "horovod_ext", "dp_ext", "ddp_spawn_ext", "ddp_fork_ext")
#: Parts of a module, each from 8 features to 8 features.
BLOCKS = (
    *("linear", "conv", "batch_norm", "nested", "branch", "shared", "frozen", "frozen_bias", "unused", "dropout"),
    *("layer_norm", "buffer", "scalar", "embedding", "sparse_embedding", "checkpointed", "weight_norm"),
)
#: Stages that may follow the first `fit`. "resume" is a `fit` of a new Trainer and a new model from a checkpoint.
LATER_STAGES = ("validate", "test", "predict", "fit", "resume")
COMPRESSIONS = ("bf16", "fp16", "powersgd", "topk", "localsgd", "diloco")


def _choice(*choices: Any) -> Any:
    """Returns a field with choices, of which the first is the simplest."""
    return field(default=choices[0], metadata={"choices": choices})


@dataclass(frozen=True)
class Case:
    """One training that can be reproduced.

    Attributes:
        strategy: The strategy under test.
        reference: The reference for the results: "ddp" is Lightning's strategy, "one" is one device on the whole batch,
            "none" is no reference (the ranks must agree with each other, and the case must end).
        blocks: Parts of the module, from :data:`BLOCKS`.
        later: Stages after the first `fit`, from :data:`LATER_STAGES`.
        uneven: Value of `uneven_inputs`, for ranks with different numbers of batches.
        exchanges_each: Whether small gradients are exchanged over `shm` one by one, like large gradients.
        kill: The training step at which rank 1 is killed in elastic training; 0 means never.
        fault: A fault to inject into the strategy under test, which the check must detect. It is never drawn.
    """

    strategy: str
    seed: int
    reference: str = _choice("ddp", "one")
    blocks: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    world_size: int = _choice(2, 3)
    backend: str = _choice("shm", "gloo")
    optimizer: str = _choice("sgd", "momentum", "adam", "adamw", "adagrad")
    optimization: str = _choice("automatic", "manual", "two")
    scheduler: str = _choice("", "step", "every_other_step", "epoch", "plateau")
    edit_gradients: str = _choice("", "on_after_backward", "on_before_optimizer_step")
    log_step: bool = _choice(False, True)
    log_epoch: bool = _choice(True, False)
    log_synced: bool = _choice(True, False)
    log_reduction: str = _choice("mean", "sum", "min", "max")
    log_metric: bool = _choice(False, True)
    data: str = _choice("map", "iterable", "combined")
    container: str = _choice("tuple", "dict")
    num_samples: int = _choice(24, 23, 16, 37)
    num_evaluation_samples: int = _choice(12, 7, 13)
    batch_size: int = _choice(2, 1, 3, 4)
    shuffle: bool = _choice(False, True)
    drop_last: bool = _choice(False, True)
    accumulate: int = _choice(1, 2, 3)
    clip: tuple[str, float] | None = _choice(None, ("norm", 0.1), ("value", 0.02))
    limit_train: int | float = _choice(1.0, 3, 0.5)
    limit_val: int | float = _choice(1.0, 2, 0)
    val_check_interval: int | float = _choice(1.0, 0.5, 2)
    check_val_every_n_epoch: int = _choice(1, 2)
    max_epochs: int = _choice(1, 2, 3)
    max_steps: int = _choice(-1, 3, 5)
    precision: str = _choice("64-true", "32-true", "bf16-mixed")
    num_sanity_val_steps: int = _choice(0, 2)
    reload_every_n_epochs: int = _choice(0, 1)
    checkpoint: str = _choice("", "epoch", "steps", "best")
    callback: str = _choice("", "ema", "swa", "early_stopping", "accumulation")
    bucket_view: bool = _choice(False, True)
    exchanges_each: bool = _choice(False, True)
    find_unused: bool = _choice(False, True)
    static_graph: bool = _choice(False, True)
    sync_batchnorm: bool = _choice(False, True)
    unfreeze: bool = _choice(False, True)
    compression: str = _choice("", *COMPRESSIONS)
    uneven: str = _choice("", "stop", "join")
    kill: int = _choice(0, 2, 5)
    fault: str = ""

    @property
    def is_close_enough(self) -> bool:
        """Whether the strategy adds in a different order than its reference, so that the last bits may differ."""
        return (
            self.reference == "one" or self.strategy == "horovod_ext" or (self.world_size > 2 and self.backend == "shm")
        )

    @property
    def needs_find_unused(self) -> bool:
        return self.find_unused or self.optimization == "two" or bool({"branch", "unused"} & set(self.blocks))

    def __str__(self) -> str:
        """Fields that do not have their simplest value."""
        plain = Case(self.strategy, self.seed)
        names = [one.name for one in dataclasses.fields(self)]
        shown = [name for name in names[2:] if getattr(self, name) != getattr(plain, name)]
        return f"{self.strategy} seed {self.seed}: " + ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)


def draw(strategy: str, seed: int) -> Case:
    """Draws a case. Half of the choices are the simplest one, so that a case combines several features, but not all."""
    source = random.Random(f"{strategy} {seed}")
    values: dict[str, Any] = {}
    for one in dataclasses.fields(Case):
        choices = one.metadata.get("choices")
        if choices is not None:
            values[one.name] = source.choice(choices) if source.random() < _share(one.name) else choices[0]
    values["blocks"] = tuple(source.choices(BLOCKS, k=source.randrange(4)))
    values["later"] = tuple(source.choices(LATER_STAGES, k=source.randrange(3)))
    return possible(Case(strategy, seed, **values))


def _share(name: str) -> float:
    """Returns the probability that a field is drawn from all of its choices."""
    if name in ("compression", "uneven", "kill", "unfreeze", "static_graph", "world_size"):
        return 0.15
    return 0.9 if name in ("optimizer", "num_samples", "batch_size", "reference", "max_epochs") else 0.5


def possible(case: Case) -> Case:
    """Resets choices that cannot be combined, or for which the reference computes a different result."""
    changes: dict[str, Any] = {}
    has = set(case.blocks)
    spawned = case.strategy in ("ddp_spawn_ext", "ddp_fork_ext")
    torch_ranks = spawned or case.strategy == "ddp_ext"
    if case.strategy == "dp_ext":
        changes |= {"reference": "one", "backend": "shm", "data": "map" if case.data == "iterable" else case.data}
    if not torch_ranks:
        changes |= {"world_size": case.world_size if case.strategy == "dp_ext" else 2, "backend": "shm"}
        changes |= {"bucket_view": False, "find_unused": False, "static_graph": False, "compression": "", "kill": 0}
    if case.strategy in ("dp_ext", "ddp_fork_ext"):
        changes |= {"uneven": "", "kill": 0}
    if case.strategy != "ddp_spawn_ext":
        changes |= {"kill": 0}
    if "branch" in has or case.optimization == "two":
        changes["static_graph"] = False  # passes use different parameters
    if torch_ranks and case.optimization == "two" and "sparse_embedding" in has:
        changes["blocks"] = tuple(b for b in case.blocks if b != "sparse_embedding")  # refused: unused by one loss
    if case.strategy == "horovod_ext" and case.optimization != "automatic" and has & {"batch_norm", "buffer"}:
        changes["optimization"] = "automatic"  # DDP then broadcasts buffers in the first step only
    case = dataclasses.replace(case, **changes)
    changes = {}
    if case.kill or case.compression or case.uneven:
        # Elastic ranks, compressed gradients, and ranks with different numbers of batches have no reference.
        features = {"kill": case.kill, "compression": case.compression, "uneven": case.uneven}
        remaining = next(name for name, value in features.items() if value)
        changes |= {"kill": 0, "compression": "", "uneven": "", remaining: features[remaining], "reference": "none"}
        changes |= {"data": "iterable" if remaining == "uneven" else "map", "static_graph": False, "unfreeze": False}
        changes |= {"world_size": 2, "sync_batchnorm": False}
        if "sparse_embedding" in has:
            changes["optimizer"] = "sgd"  # Adam and some others refuse sparse gradients
            if case.clip and case.clip[0] == "value":
                changes["clip"] = None  # torch clips dense gradients only
        if remaining == "kill":
            changes |= {"later": (), "max_steps": -1, "callback": "", "val_check_interval": 1.0}
    elif spawned and (case.reference == "one" or case.unfreeze or case.static_graph):
        changes |= {"reference": "ddp", "unfreeze": False, "static_graph": False}
    elif case.static_graph or case.unfreeze or "sparse_embedding" in has:
        # Lightning's `ddp` computes a different result, or fails.
        changes |= (
            {"reference": "one"} if not spawned else {"blocks": tuple(b for b in case.blocks if "sparse" not in b)}
        )
    if spawned and "sparse_embedding" in has:
        changes["blocks"] = tuple(block for block in case.blocks if block != "sparse_embedding")
    case = dataclasses.replace(case, **changes)
    changes = {}
    if case.reference == "one":
        if not (case.strategy == "dp_ext" and case.sync_batchnorm):
            changes["blocks"] = tuple(block for block in case.blocks if block != "batch_norm")
        changes["blocks"] = tuple(block for block in changes.get("blocks", case.blocks) if block != "dropout")
        changes |= {"precision": "64-true", "log_synced": True, "log_reduction": "mean", "num_evaluation_samples": 12}
        changes |= {"data": "map" if case.data == "iterable" else case.data}
        if case.world_size == 3:
            changes["num_samples"] = 24
    if case.is_close_enough:
        changes["precision"] = "64-true"
    if case.strategy != "dp_ext":
        changes["sync_batchnorm"] = False  # refused on CPUs
    if case.strategy == "horovod_ext" and case.callback == "ema" and "batch_norm" in has:
        changes["callback"] = ""
    if spawned and case.callback == "ema" and case.later and has & {"batch_norm", "buffer"}:
        # Workers of a later stage receive rank 0's average; a rank of Lightning's `ddp` keeps its average.
        changes["callback"] = ""
    if case.data != "map" or case.max_steps != -1:
        changes |= {"val_check_interval": 1.0 if case.data == "iterable" else case.val_check_interval}
    if spawned and {"fit", "resume"} & set(case.later):
        # Lightning's `ddp` seeds the random generators again in each stage. Those of workers continue.
        changes["blocks"] = tuple(block for block in changes.get("blocks", case.blocks) if block != "dropout")
    if case.data == "iterable":
        changes |= {"limit_train": 1.0 if isinstance(case.limit_train, float) else case.limit_train, "shuffle": False}
    if "batch_norm" in has and case.batch_size == 1:
        changes["batch_size"] = 2  # batch normalization refuses batches of one sample
    if "batch_norm" in has and case.num_samples != 24:
        changes["num_samples"] = 24
    if "batch_norm" in has and case.data == "combined":
        changes["data"] = "map"
    if case.optimization != "automatic" and case.callback in ("swa", "accumulation"):
        changes["callback"] = ""
    if case.callback == "accumulation":
        changes["accumulate"] = 1
    if case.optimization == "two" and case.edit_gradients:
        changes["edit_gradients"] = ""
    accumulates = case.accumulate > 1 or case.callback == "accumulation"
    if accumulates and case.edit_gradients == "on_after_backward" and changes.get("reference", case.reference) == "one":
        # The hook edits the gradients of each rank before their mean, and those of one device after it.
        changes["edit_gradients"] = "on_before_optimizer_step"
    # Without a reference, no exception is expected, for example of a callback that requires validation.
    may_end_early = case.max_steps > 0 and changes.get("reference", case.reference) == "none"
    if case.limit_val == 0 or case.check_val_every_n_epoch > 1 or may_end_early:
        if case.callback == "early_stopping":
            changes["callback"] = ""
        if case.checkpoint == "best":
            changes["checkpoint"] = "epoch"
        if case.scheduler == "plateau":
            changes["scheduler"] = "epoch"
    return dataclasses.replace(case, **changes)


def simplifications(case: Case) -> Iterator[Case]:
    """Yields cases that are simpler by one drawn choice."""
    for name in ("later", "blocks"):
        parts = getattr(case, name)
        for index in range(len(parts)):
            yield dataclasses.replace(case, **{name: parts[:index] + parts[index + 1 :]})
    for one in dataclasses.fields(Case):
        choices = one.metadata.get("choices", ())
        value = getattr(case, one.name)
        if one.name == "reference" or value not in choices:
            continue
        for simpler in choices[: choices.index(value)][:2]:
            changed = dataclasses.replace(case, **{one.name: simpler})
            if possible(changed) == changed:
                yield changed
