"""Short forms of a process group's methods: one tensor and settings by name, instead of lists and options.

torch's own groups accept both forms, and torch uses both: DDP calls ``group.allreduce(tensor)`` to match unused
parameters.
"""

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from inspect import Parameter, Signature
from typing import Any, Final, TypeVar, cast

from torch import Tensor
from torch.distributed import ReduceOp

Collective = TypeVar("Collective", bound=Callable[..., Any])
#: Settings, each with the name of its option.
_OPTIONS: Final = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
_SETTINGS: Final = (ReduceOp, ReduceOp.RedOpType, timedelta, int)


def accept_single_tensor(
    make_options: Callable[[], Any], tensors: Sequence[str], settings: Sequence[str]
) -> Callable[..., Any]:
    """Makes a collective accept its short form, too.

    Args:
        make_options: Function that creates the options, which follow the lists of tensors in the long form.
        tensors: Names of the short form's tensors, or lists of tensors.
        settings: Names of the short form's settings, in order; keys of :data:`_OPTIONS`.
    """
    names = [*tensors, *settings]
    short = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in names])

    def decorate(collective: Collective) -> Collective:
        @functools.wraps(collective)
        def wrapper(group: Any, *args: Any, **kwargs: Any) -> Any:
            is_short = any(isinstance(argument, (Tensor, *_SETTINGS)) for argument in args)
            if not is_short and kwargs.keys().isdisjoint(names):
                return collective(group, *args, **kwargs)
            arguments = short.bind(*args, **kwargs).arguments
            options = make_options()
            for name in settings:
                if arguments.get(name) is not None:
                    setattr(options, _OPTIONS[name], arguments[name])
            return collective(group, *(_as_list(arguments[name], len(tensors)) for name in tensors), options)

        return cast(Collective, wrapper)

    return decorate


def _as_list(argument: Any, num_arguments: int) -> Any:
    """Returns a tensor as a list with one item; with several arguments, also wraps a nonempty list of tensors."""
    if isinstance(argument, Tensor) or (num_arguments > 1 and len(argument) > 0):
        return [argument]
    return argument
