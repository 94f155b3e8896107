"""Checks of the types of arguments, and options of the checks during training."""

import sys
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

#: Fields that ranks compare after each training epoch: of parameter groups, and of the whole training.
GROUP_FIELDS = ("lr", "weight_decay", "momentum")
TRAINING_FIELDS = ("optimizer_steps", "sampler_seed")

MissingLoss = Literal["error", "skip"]
NonfiniteLoss = Literal["ignore", "error", "skip"]
_LOSSES = ("missing_loss", "nonfinite_loss")


@dataclass(frozen=True)
class ChecksOptions:
    """Options of the checks that ranks agree during ``fit``.

    Args:
        excluded_fields: Fields that may differ between ranks: "lr", "weight_decay", and "momentum" of parameter groups,
            "optimizer_steps" (their number), and "sampler_seed". Ranks compare the other fields after each epoch.
        missing_loss: Reaction to a training step in which a rank has no loss: "error" raises an error; "skip" averages
            the gradients over the ranks that have a loss, see :mod:`.pytorch.step_losses`.
        nonfinite_loss: Reaction to a loss that is NaN or infinite: "ignore"; "error" on all ranks, with the module that
            has computed it; "skip" treats the rank as one without a loss.
        check_collectives: Whether ranks compare each collective before it starts, including your own
            ``torch.distributed`` calls, for debugging. Each comparison is one all-gather of 1 KiB, and reads the stack.

    Raises:
        TypeError: If ``excluded_fields`` is no sequence of strings, or ``check_collectives`` is no bool.
        ValueError: If a field or a reaction is unknown.

    Example::

        # each rank has a learning rate of its own
        DDPStrategy(checks=ChecksOptions(excluded_fields=("lr",)))
    """

    excluded_fields: tuple[str, ...] = ()
    missing_loss: MissingLoss = "error"
    nonfinite_loss: NonfiniteLoss = "ignore"
    check_collectives: bool = False

    def __post_init__(self) -> None:
        check_flag("check_collectives", self.check_collectives)
        names = self.excluded_fields
        if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"`excluded_fields` must be a tuple of names, got {names!r}.")
        for name in names:
            if name not in (*GROUP_FIELDS, *TRAINING_FIELDS):
                known = ", ".join((*GROUP_FIELDS, *TRAINING_FIELDS))
                raise ValueError(f"`excluded_fields={names!r}`: the field {name!r} is unknown. Use some of {known}.")
        object.__setattr__(self, "excluded_fields", tuple(names))
        for name, reactions in zip(_LOSSES, (get_args(MissingLoss), get_args(NonfiniteLoss)), strict=True):
            if getattr(self, name) not in reactions:
                raise ValueError(f"`{name}={getattr(self, name)!r}` is unknown. Use one of {', '.join(reactions)}.")


def argument_that_skips(checks: ChecksOptions) -> str | None:
    """Returns the argument ``checks`` with a field by which losses are skipped; None if no loss is skipped."""
    names = [name for name in _LOSSES if getattr(checks, name) == "skip"]
    return f"`checks=ChecksOptions({names[0]}='skip')`" if names else None


def argument_on_losses(checks: ChecksOptions) -> str | None:
    """Returns the argument ``checks`` with a field on losses that is not the default; None if all are."""
    is_error = checks.nonfinite_loss == "error"
    return "`checks=ChecksOptions(nonfinite_loss='error')`" if is_error else argument_that_skips(checks)


def check_checks(checks: Any, *, is_elastic: bool = False) -> ChecksOptions:
    """Returns the argument ``checks`` of a strategy, or the default options if it is None.

    Args:
        checks: Value that the user passed.
        is_elastic: Whether ranks may change during ``fit``.

    Raises:
        TypeError: If the value has another type.
        ValueError: If losses are skipped or searched in elastic training.
    """
    if checks is None:
        return ChecksOptions()
    if not isinstance(checks, ChecksOptions):
        raise TypeError(f"`checks` must be a ChecksOptions, got {checks!r}.")
    argument = argument_on_losses(checks)
    if is_elastic and argument is not None:
        raise ValueError(
            f"{argument} cannot be combined with `elastic=True`: a rank that is lost in a step would count"
            " as a rank without a loss. Omit one of the two."
        )
    return checks


def check_fabric_checks(checks: Any) -> ChecksOptions:
    """Returns the argument ``checks`` of a strategy for Fabric, or the default options if it is None.

    Args:
        checks: Value that the user passed.

    Raises:
        TypeError: If the value has another type.
        ValueError: If a field other than ``check_collectives`` is set.
    """
    options = check_checks(checks)
    if replace(options, check_collectives=False) != ChecksOptions():
        raise ValueError(
            f"`checks={options}`: Fabric supports only the field `check_collectives`, because losses and epochs belong"
            " to your training loop. Omit the other fields, or use the Trainer."
        )
    return options


def check_can_skip(checks: ChecksOptions | None, *conflicts: str | None) -> None:
    """Checks that gradients can be averaged over the ranks that have a loss.

    Args:
        checks: Options of the checks.
        *conflicts: Arguments that exclude it, with their values; None for arguments that are not set.

    Raises:
        ValueError: If losses are skipped, and such an argument is set.
    """
    conflict = next((each for each in conflicts if each is not None), None)
    argument = argument_that_skips(checks) if isinstance(checks, ChecksOptions) else None
    if argument is not None and conflict is not None:
        raise ValueError(
            f"{argument} averages gradients over the ranks that have a loss, which cannot be combined with"
            f" `{conflict}`. Omit one of the two."
        )


def check_int(name: str, value: Any, minimum: int) -> int:
    """Returns an integer argument if it is valid.

    Args:
        name: Name of the argument.
        value: Value that the user passed.
        minimum: Minimum.

    Raises:
        TypeError: If the value is not an integer.
        ValueError: If the value is less than the minimum.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a whole number, got {value!r}.")
    if value < minimum:
        raise ValueError(f"`{name}={value}` must be at least {minimum}.")
    return value


def check_flag(name: str, value: Any) -> bool:
    """Returns a boolean argument if it is valid.

    Args:
        name: Name of the argument.
        value: Value that the user passed.

    Raises:
        TypeError: If the value is neither True nor False.
    """
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {value!r}.")
    return value


def is_compiled(module: Any) -> bool:
    """Returns whether a module is compiled: by ``torch.compile(module)``, or in place by ``module.compile()``."""
    # The import of `torch._dynamo` takes a second; before it, no module is compiled. `module.compile()` stores the
    # compiled call in a private attribute (torch 2.5 to 2.13).
    dynamo = sys.modules.get("torch._dynamo")
    is_wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return is_wrapped or getattr(module, "_compiled_call_impl", None) is not None
