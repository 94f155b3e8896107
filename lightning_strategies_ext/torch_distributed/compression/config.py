"""Compressions and their parameters, as users specify them. The module imports only what these need."""

from dataclasses import dataclass
from math import inf
from typing import ClassVar, Final, Literal, TypeAlias, get_args

from lightning_strategies_ext.checks import check_int

#: Key in checkpoints of the state of a compression.
STATE_KEY: Final = "lightning_strategies_ext.compression"

CompressionName: TypeAlias = Literal["bf16", "fp16", "powersgd", "topk", "localsgd", "diloco"]


@dataclass(frozen=True)
class Compression:
    """Compression of the gradient exchange. Use one of the subclasses.

    Attributes:
        name: Name in ``DDPStrategy(compression=...)`` and at the end of a strategy's name.
    """

    name: ClassVar[str]


@dataclass(frozen=True)
class BFloat16(Compression):
    """Exchanges and sums gradients in bfloat16: half of the bytes, with 8 significant bits per number."""

    name: ClassVar[str] = "bf16"


@dataclass(frozen=True)
class Float16(Compression):
    """Exchanges and sums gradients in float16: half of the bytes, with 11 significant bits; inf above 65,504."""

    name: ClassVar[str] = "fp16"


@dataclass(frozen=True)
class PowerSGD(Compression):
    """Exchanges each gradient matrix as a product of two thin matrices; adds the error to the next gradients.

    The algorithm is that of Vogels et al. 2019 (https://arxiv.org/abs/1905.13727), with its warm start. Tensors of more
    dimensions are treated as matrices of their first dimension by all others. Tensors that would not become smaller are
    sent whole. A rank keeps the error, in memory of the size of the gradients.

    Args:
        rank: Number of columns of the thin matrices. More columns approximate the gradients better, and take more
            bytes.
        warmup_steps: Number of steps at the beginning with whole gradients.

    Raises:
        TypeError: If an argument is not an integer.
        ValueError: If ``rank`` is not positive, or ``warmup_steps`` is negative.
    """

    name: ClassVar[str] = "powersgd"
    rank: int = 4
    warmup_steps: int = 10

    def __post_init__(self) -> None:
        check_int("rank", self.rank, 1)
        check_int("warmup_steps", self.warmup_steps, 0)


@dataclass(frozen=True)
class TopK(Compression):
    """Exchanges the largest gradients with their indices; adds all others to the next gradients.

    This is gradient sparsification with memory (Stich et al. 2018, https://arxiv.org/abs/1809.07599). The threshold is
    found from a sample, as in Lin et al. 2017 (https://arxiv.org/abs/1712.01887). A rank keeps the unsent gradients, in
    memory of the size of the gradients.

    Args:
        fraction: Fraction of each parameter's gradients that is sent, above 0 and at most 1. Each gradient takes eight
            bytes, and all ranks receive the gradients of all ranks.
        warmup_steps: Number of steps at the beginning with whole gradients.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``fraction`` is out of its range, or ``warmup_steps`` is negative.
    """

    name: ClassVar[str] = "topk"
    fraction: float = 0.01
    warmup_steps: int = 10

    def __post_init__(self) -> None:
        _check_positive("fraction", self.fraction, 1)
        check_int("warmup_steps", self.warmup_steps, 0)


@dataclass(frozen=True)
class LocalSGD(Compression):
    """Averages the models of all ranks periodically; in between, ranks take independent steps.

    See Stich 2018 (https://arxiv.org/abs/1805.09767); with ``warmup_steps``, the post-local SGD of Lin et al. 2018
    (https://arxiv.org/abs/1808.07217). If there are several hosts, the ranks of one host exchange gradients in each
    step.

    Args:
        period: Number of steps of an optimizer between two averagings.
        warmup_steps: Number of steps at the beginning that exchange whole gradients instead.

    Raises:
        TypeError: If an argument is not an integer.
        ValueError: If ``period`` is not positive, or ``warmup_steps`` is negative.
    """

    name: ClassVar[str] = "localsgd"
    period: int = 32
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        check_int("period", self.period, 1)
        check_int("warmup_steps", self.warmup_steps, 0)


@dataclass(frozen=True)
class DiLoCo(LocalSGD):
    """Local SGD with outer steps: Nesterov's momentum, from the last common model along the mean change of the ranks.

    See Douillard et al. 2023 (https://arxiv.org/abs/2311.08105), the source of the learning rate. Their momentum is
    0.9, with 500 steps between exchanges. With 32 steps, 0.9 made the loss 7 to 11 % larger in
    ``benchmarks.multi_host``, and 0.5 makes it 1 % larger. A rank keeps two copies of the model.

    Args:
        period: Number of steps of an optimizer between two outer steps.
        warmup_steps: Number of steps at the beginning that exchange whole gradients instead.
        learning_rate: Learning rate of the outer steps; 1 without momentum is local SGD.
        momentum: Momentum of the outer steps, at least 0 and below 1.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a value is out of its range.
    """

    name: ClassVar[str] = "diloco"
    learning_rate: float = 0.7
    momentum: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive("learning_rate", self.learning_rate)
        _check_is_number("momentum", self.momentum)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"`momentum` must be at least 0 and below 1, got {self.momentum!r}.")


_BY_NAME: dict[str, type[Compression]] = {
    kind.name: kind for kind in (BFloat16, Float16, PowerSGD, TopK, LocalSGD, DiLoCo)
}
assert tuple(_BY_NAME) == get_args(CompressionName)


def resolve_compression(value: "CompressionName | Compression | None") -> Compression | None:
    """Returns the compression that an argument specifies.

    Raises:
        TypeError: If the argument is neither a name nor a compression.
        ValueError: If no compression has this name.
    """
    if isinstance(value, str):
        if value not in _BY_NAME:
            known = ", ".join(repr(name) for name in _BY_NAME)
            raise ValueError(f"`compression={value!r}` is unknown. Use one of {known}.")
        return _BY_NAME[value]()
    if value is not None and (not isinstance(value, Compression) or type(value) is Compression):
        raise TypeError(
            f"`compression` must be a name such as 'bf16', a compression such as `PowerSGD(rank=2)`, or None, got"
            f" {value!r}."
        )
    return value


def is_stateless(compression: Compression | None) -> bool:
    """Returns whether the exchanges of a compression, or without one, are independent of earlier steps."""
    return compression is None or isinstance(compression, (BFloat16, Float16))


def _check_is_number(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a number, got {value!r}.")


def _check_positive(name: str, value: float, highest: float = inf) -> None:
    _check_is_number(name, value)
    if not 0 < value <= highest:
        limit = "" if highest == inf else f" and at most {highest:g}"
        raise ValueError(f"`{name}` must be above 0{limit}, got {value}.")
