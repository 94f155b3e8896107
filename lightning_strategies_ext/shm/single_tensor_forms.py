"""Short forms of a process group's methods: one tensor and settings by name, instead of lists and options.

torch's own groups accept both forms, and torch uses both: DDP calls ``group.allreduce(tensor)`` to match unused
parameters. A list of the long form has one item per device of a rank, and a rank of ``shm`` has one device.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from inspect import Parameter, Signature
from typing import Any, Final, TypeVar, cast

from torch import Tensor
from torch.distributed import ReduceOp

Collective = TypeVar("Collective", bound=Callable[..., Any])
#: Settings, each with the name of its option.
_OPTIONS: Final = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
#: Classes of positional arguments that only the short form has.
_OF_SHORT_FORM: Final = (Tensor, ReduceOp, ReduceOp.RedOpType, timedelta, int)


def accept_single_tensor(
    make_options: Callable[[], Any], tensors: Sequence[str], settings: Sequence[str]
) -> Callable[..., Any]:
    """Makes a collective accept its short form and the names of arguments in both forms, and checks the long form.

    Args:
        make_options: Function that creates the options, which follow the lists of tensors in the long form.
        tensors: Names of the short form's tensors, or lists of tensors.
        settings: Names of the short form's settings, in order; keys of :data:`_OPTIONS`.
    """
    stems = [_stem(name) for name in tensors]
    by_position = [Parameter(stem, Parameter.POSITIONAL_OR_KEYWORD) for stem in stems]
    by_position += [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in settings]
    signature = Signature([*by_position, Parameter("opts", Parameter.KEYWORD_ONLY, default=None)])

    def long_form(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        renamed = {_stem(key) if _stem(key) in stems else key: value for key, value in kwargs.items()}
        bound = signature.bind(*args, **renamed)
        bound.apply_defaults()
        arguments = bound.arguments
        given = [arguments[stem] for stem in stems]
        is_short = any(isinstance(argument, Tensor) for argument in given)
        options = arguments["opts"]
        if is_short and options is not None:
            raise TypeError(f"{name}: the form with `opts` accepts lists of tensors, not tensors.")
        options = make_options() if options is None else options
        for setting in settings:
            if arguments[setting] is not None:
                setattr(options, _OPTIONS[setting], arguments[setting])
        return *(_as_list(argument, len(stems)) if is_short else argument for argument in given), options

    def decorate(collective: Collective) -> Collective:
        @functools.wraps(collective)
        def wrapper(group: Any, *args: Any, **kwargs: Any) -> Any:
            is_long = not kwargs
            for argument in args:
                is_long = is_long and not isinstance(argument, _OF_SHORT_FORM)
            if not is_long:
                args = long_form(collective.__name__, args, kwargs)
            for tensors_of_argument in args[: len(stems)]:
                if len(tensors_of_argument) > 1:
                    raise ValueError(
                        f"{collective.__name__.lstrip('_')}: the process group 'shm' accepts one tensor per rank and"
                        " call. Call it once per tensor, or call the coalesced form."
                    )
            return collective(group, *args)

        return cast(Collective, wrapper)

    return decorate


def _stem(name: str) -> str:
    """Returns what the names of an argument in both forms share, for example "input" of "input_tensors"."""
    return name.removesuffix("s").removesuffix("_tensor")


def _as_list(argument: Any, num_arguments: int) -> Any:
    """Returns a tensor as a list with one item; with several arguments, also wraps a nonempty list of tensors."""
    if isinstance(argument, Tensor) or (num_arguments > 1 and len(argument) > 0):
        return [argument]
    return argument
