"""What users ask for: compressions and their parameters. Nothing here imports more than that needs."""

from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal, TypeAlias, get_args

from lightning_strategies_ext.checks import check_whole_number

CompressionName: TypeAlias = Literal["bf16", "fp16", "powersgd", "topk", "localsgd", "diloco"]


@dataclass(frozen=True)
class Compression:
    """Something smaller that ranks exchange in place of their gradients. Use one of the subclasses.

    Attributes:
        name: What it is called in ``DDPStrategy(compression=...)`` and at the end of a strategy's name.
    """

    name: ClassVar[str]


@dataclass(frozen=True)
class BFloat16(Compression):
    """Gradients are exchanged, and added up, in bfloat16: half of the bytes, with 8 bits of each number left."""

    name: ClassVar[str] = "bf16"


@dataclass(frozen=True)
class Float16(Compression):
    """Gradients are exchanged, and added up, in float16: half of the bytes, with 11 bits; above 65,504 is inf."""

    name: ClassVar[str] = "fp16"


@dataclass(frozen=True)
class PowerSGD(Compression):
    """Each matrix of gradients is exchanged as a product of two thin ones; what is lost is added to the next gradients.

    The algorithm is that of Vogels et al. 2019 (https://arxiv.org/abs/1905.13727), with its warm start. Tensors of
    more dimensions are matrices of their first dimension by all others. What would not get smaller is sent as it is.
    A rank keeps a copy of the gradients' size, for what is lost.

    Args:
        rank: Columns of the thin matrices: more are closer to the gradients, and more bytes.
        warmup_steps: Steps at the beginning with whole gradients.

    Raises:
        TypeError: If an argument is no integer.
        ValueError: If ``rank`` is not positive, or ``warmup_steps`` is negative.
    """

    name: ClassVar[str] = "powersgd"
    rank: int = 4
    warmup_steps: int = 10

    def __post_init__(self) -> None:
        check_whole_number("rank", self.rank, 1)
        check_whole_number("warmup_steps", self.warmup_steps, 0)


@dataclass(frozen=True)
class TopK(Compression):
    """The largest gradients are exchanged with their places; all others are added to the next gradients.

    That is gradient sparsification with memory (Stich et al. 2018, https://arxiv.org/abs/1809.07599). What counts for
    large is found from a sample, as Lin et al. 2017 do (https://arxiv.org/abs/1712.01887). A rank keeps a copy of the
    gradients' size, for what was not sent.

    Args:
        fraction: Of the gradients of a bucket that are sent, above 0 and at most 1. Each costs eight bytes, and all
            ranks receive those of all.
        warmup_steps: Steps at the beginning with whole gradients.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If ``fraction`` is out of its range, or ``warmup_steps`` is negative.
    """

    name: ClassVar[str] = "topk"
    fraction: float = 0.01
    warmup_steps: int = 10

    def __post_init__(self) -> None:
        _check_positive("fraction", self.fraction, 1)
        check_whole_number("warmup_steps", self.warmup_steps, 0)


@dataclass(frozen=True)
class LocalSGD(Compression):
    """Ranks take steps of their own, and every so many of them the mean of their models is the model of all.

    See Stich 2018 (https://arxiv.org/abs/1805.09767); with ``warmup_steps``, the post-local SGD of Lin et al. 2018
    (https://arxiv.org/abs/1808.07217). Ranks of one host exchange gradients in each step if there are several hosts.

    Args:
        period: Steps of an optimizer from one mean to the next.
        warmup_steps: Steps at the beginning with whole gradients in place of means.

    Raises:
        TypeError: If an argument is no integer.
        ValueError: If ``period`` is not positive, or ``warmup_steps`` is negative.
    """

    name: ClassVar[str] = "localsgd"
    period: int = 32
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        check_whole_number("period", self.period, 1)
        check_whole_number("warmup_steps", self.warmup_steps, 0)


@dataclass(frozen=True)
class DiLoCo(LocalSGD):
    """Local SGD whose models move on from the last common one by Nesterov's momentum, along what the ranks have found.

    See Douillard et al. 2023 (https://arxiv.org/abs/2311.08105), from which the learning rate is. Their momentum is
    0.9, with 500 steps from one exchange to the next. With 32 that made the loss 7 to 11 % larger in
    ``benchmarks.hosts``, and 0.5 makes it 1 % larger. A rank keeps two copies of the model.

    Args:
        period: Steps of an optimizer from one step of all to the next.
        warmup_steps: Steps at the beginning with whole gradients in place of that.
        learning_rate: Of the steps of all; 1 without momentum is local SGD.
        momentum: Of the steps of all, at least 0 and below 1.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value cannot work.
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


def compression_of(asked_for: "CompressionName | Compression | None") -> Compression | None:
    """The compression that an argument asks for.

    Raises:
        TypeError: If it is neither a name nor a compression.
        ValueError: If there is none of that name.
    """
    if isinstance(asked_for, str):
        if asked_for not in _BY_NAME:
            known = ", ".join(repr(name) for name in _BY_NAME)
            raise ValueError(f"`compression={asked_for!r}` is none that there is. Use one of {known}.")
        return _BY_NAME[asked_for]()
    if asked_for is not None and (not isinstance(asked_for, Compression) or type(asked_for) is Compression):
        raise TypeError(
            f"`compression` must be a name such as 'bf16', a compression such as `PowerSGD(rank=2)`, or None, got"
            f" {asked_for!r}."
        )
    return asked_for


def _check_is_number(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a number, got {value!r}.")


def _check_positive(name: str, value: float, highest: float = inf) -> None:
    _check_is_number(name, value)
    if not 0 < value <= highest:
        limit = "" if highest == inf else f" and at most {highest:g}"
        raise ValueError(f"`{name}` must be above 0{limit}, got {value}.")
