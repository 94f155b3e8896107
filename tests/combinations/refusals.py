"""Refusals that the documentation describes. Other exceptions are wrong, and so are cells of this list that train."""

from dataclasses import dataclass

from tests.combinations.features import BY_NAME, DDP, DP, ELASTIC, HOROVOD

#: Words with which a message introduces an alternative.
_REMEDY_VERBS = ("Leave", "leave", "Use", "use ", "Set ", "Give", "Pass", "Compile", "Write", "Build", "Omit", "omit")


@dataclass(frozen=True)
class Refusal:
    """A feature, or a pair of features, that strategies refuse.

    Attributes:
        features: Names of the features.
        text: A part of the message.
        strategies: Names of the strategies, with the prefix "fabric " for strategies of Fabric.
    """

    features: frozenset[str]
    text: str
    strategies: frozenset[str]

    def is_in(self, strategy: str, cell: tuple[str, ...]) -> bool:
        """Returns whether a cell has these features."""
        return strategy in self.strategies and self.features <= set(cell)

    def explains(self, message: str) -> bool:
        """Returns whether a message is this refusal, and names its features and an alternative."""
        named = [BY_NAME[name].named for name in self.features]
        return (
            self.text in message
            and all(any(word in message for word in words) for words in named if words)
            and any(word in message for word in _REMEDY_VERBS)
        )


def _refusal(text: str, *features: str, strategies: frozenset[str] = DDP) -> Refusal:
    return Refusal(frozenset(features), text, strategies)


_COMPRESSIONS = tuple(f"compression {name}" for name in ("bf16", "fp16", "powersgd", "topk", "localsgd", "diloco"))

_LOSSES = ("missing loss: skip", "NaN loss: skip", "NaN loss: error")
_SKIPS = _LOSSES[:2]
#: Features by which an argument of DDP or Horovod conflicts with skipped losses, or by which the module does.
_DDP_EXCHANGES = ("static graph", "compression localsgd", "compression diloco")
_MODULES = ("LBFGS", "sparse embedding")

#: Strategies whose workers receive the module as a pickle.
_SPAWNED = frozenset({"ddp_spawn_ext", "ddp_spawn_elastic_ext", "ddp_ray_ext", "ddp_ray_elastic_ext"})

REFUSALS = (
    _refusal("`sync_batchnorm=True` requires GPUs", "SyncBatchNorm", strategies=DDP | HOROVOD),
    _refusal("that `torch.compile` has compiled", "compiled module", strategies=DP | HOROVOD),
    _refusal("cannot be sent to the worker processes", "compiled module", strategies=_SPAWNED),
    _refusal("is compiled: its compiled code", "compiled submodule", strategies=DP | {"fabric dp_ext"}),
    _refusal("outside of its step", "SyncBatchNorm", "checkpointed activations", strategies=DP),
    _refusal("only the Trainer's `fit` can search", "buckets by trial", strategies=frozenset({"fabric ddp_ext"})),
    _refusal("has state that belongs in checkpoints", "compression powersgd", strategies=frozenset({"fabric ddp_ext"})),
    _refusal("Use the Trainer", "Horovod: adasum", strategies=frozenset({"fabric horovod_ext"})),
    *(
        _refusal("tries buckets of several sizes", "buckets by trial", feature)
        for feature in (*_COMPRESSIONS, "uneven inputs: stop", "uneven inputs: join")
    ),
    _refusal(
        "averages gradients over the ranks that have data", "uneven inputs: join", "Horovod: adasum", strategies=HOROVOD
    ),
    _refusal("which elastic training sets", "buckets by trial", strategies=ELASTIC),
    *(
        _refusal("a commit has the state of one rank", f"compression {compression}", strategies=ELASTIC)
        for compression in ("localsgd", "diloco")
    ),
    _refusal("cannot be divided again", "iterable data", strategies=ELASTIC),
    _refusal("splits the division of an average", "Horovod: adasum", "Horovod: predivide", strategies=HOROVOD),
    *(
        _refusal("averages the models of all", f"compression {compression}", "uneven inputs: join")
        for compression in ("localsgd", "diloco")
    ),
    *(
        _refusal("requires automatic optimization", loss, manual, strategies=DDP | HOROVOD)
        for loss in _LOSSES
        for manual in ("manual optimization", "two optimizers", "alternating optimizers")
    ),
    *(_refusal("would count as a rank without a loss", loss, strategies=ELASTIC) for loss in _LOSSES),
    *(
        _refusal("averages gradients over the ranks that have a loss", loss, f)
        for loss in _SKIPS
        for f in _DDP_EXCHANGES
    ),
    *(
        _refusal("averages gradients over the ranks that have a loss", loss, feature, strategies=DDP | HOROVOD)
        for loss in _SKIPS
        for feature in ("uneven inputs: join", "Horovod: adasum")
    ),
    *(
        _refusal("cannot be combined with", loss, feature, strategies=DDP | HOROVOD)
        for loss in _SKIPS
        for feature in _MODULES
    ),
    *(
        _refusal("DDP drops", f"compression {compression}", feature)
        for compression in ("powersgd", "topk")
        for feature in ("unused parameters", "alternating optimizers")
    ),
)


def refusals_of(strategy: str, cell: tuple[str, ...]) -> list[Refusal]:
    """Returns the refusals that apply to a cell."""
    return [refusal for refusal in REFUSALS if refusal.is_in(strategy, cell)]
