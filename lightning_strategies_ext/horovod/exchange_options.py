"""Options of the gradient exchange over Horovod, and their checks, which do not require Horovod."""

from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer

from lightning_strategies_ext.checks import check_flag, check_int

HorovodCompression = Literal["none", "fp16"]
GradientOp = Literal["average", "sum", "adasum"]


@dataclass(frozen=True)
class HorovodExchangeOptions:
    """Options of the gradient exchange, without classes of Horovod, so that they can be checked without Horovod.

    Attributes:
        compression: Compression of gradients for the transfer, "none" or "fp16".
        op: Reduction, "average", "sum", or "adasum".
        num_groups: Number of groups of parameters, each exchanged in one operation; 0 exchanges each parameter
            separately; None groups consecutive small parameters until a group has 1 MiB.
        sparse_as_dense: Whether sparse gradients are converted to dense gradients.
        gradient_predivide_factor: Divisor of gradients before the sum. After it, they are divided by the number of
            ranks over this factor.
        process_set: Ranks that exchange gradients; None for all ranks.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value or a combination of values is invalid.
    """

    compression: HorovodCompression = "none"
    op: GradientOp = "average"
    num_groups: int | None = None
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    process_set: Any = None

    def __post_init__(self) -> None:
        if str(self.compression) == "bf16":
            raise ValueError(
                "`compression='bf16'`: Horovod 0.28 cannot sum bfloat16. Use 'fp16' (with a gradient scaler, because"
                " its range is small), or 'none'."
            )
        for name, known in (("compression", ("none", "fp16")), ("op", ("average", "sum", "adasum"))):
            if getattr(self, name) not in known:
                raise ValueError(f"`{name}={getattr(self, name)!r}` is unknown. Use one of {', '.join(known)}.")
        if self.num_groups is not None:
            check_int("num_groups", self.num_groups, 0)
        check_flag("sparse_as_dense", self.sparse_as_dense)
        if not isinstance(self.gradient_predivide_factor, (int, float)) or self.gradient_predivide_factor <= 0:
            raise ValueError(f"`gradient_predivide_factor={self.gradient_predivide_factor!r}` must be positive.")
        if self.gradient_predivide_factor != 1.0 and self.op != "average":
            raise ValueError(
                f"`gradient_predivide_factor={self.gradient_predivide_factor!r}` splits the division of an average,"
                f" but `op={self.op!r}` does not average. Omit one of the two."
            )

    @property
    def unequal_argument(self) -> str | None:
        """Argument by which gradients are not averaged over all ranks, with its value; None if they are."""
        if self.process_set is not None:
            return f"process_set={self.process_set!r}"
        return "op='adasum'" if self.op == "adasum" else None

    def check_can_join(self) -> None:
        """Checks that gradients are averaged over all ranks that have data.

        Raises:
            ValueError: If updates are combined instead, or gradients are exchanged among some ranks only.
        """
        if self.op == "adasum" or self.process_set is not None:
            reason = "`op='adasum'`" if self.op == "adasum" else "a `process_set`"
            raise ValueError(
                f"`uneven_inputs='join'` averages gradients over the ranks that have data, which {reason} does not."
                " Omit one of the two, or use `uneven_inputs='stop'`."
            )


def check_exchanges_nothing(optimizer: Optimizer, strategy: str) -> None:
    """Rejects an optimizer that exchanges gradients itself.

    Args:
        optimizer: Optimizer to check.
        strategy: Name of the strategy in the message.

    Raises:
        TypeError: If ``horovod.torch.DistributedOptimizer`` has wrapped the optimizer.
    """
    # The wrapper is a dynamically created subclass of the optimizer's class, with the same name.
    if getattr(getattr(optimizer, "zero_grad", None), "__module__", "") == "horovod.torch.optimizer":
        raise TypeError(
            f"`horovod.torch.DistributedOptimizer` wraps the optimizer {type(optimizer).__name__}, but {strategy}"
            " already exchanges its gradients: both would reduce the same gradients. Use the optimizer without the"
            " wrapper, and pass `op`, `compression` and `process_set` to the strategy."
        )
