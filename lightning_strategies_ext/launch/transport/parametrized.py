"""Modules with parametrizations (:mod:`torch.nn.utils.parametrize`): ``weight_norm``, ``orthogonal`` and their like.

Torch makes a class for each such module, with a property in the place of each tensor that is computed, and lets none of
them be pickled. All that they consist of can be, but for that class; it is made anew where it arrives.
"""

import copyreg
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import Module
from torch.nn.utils import parametrize


def is_made_by_torch(kind: type) -> bool:
    """Whether a class is one that torch has made for a parametrized module."""
    getstate = vars(kind).get("__getstate__")
    return getattr(getstate, "__module__", None) == parametrize.__name__


def class_before(obj: Any) -> type:
    """The class of an object; of a parametrized module, the one that it had before."""
    kind = type(obj)
    return kind.__bases__[0] if is_made_by_torch(kind) else kind


def names_of_computed(kind: type) -> list[str]:
    """The tensors that a class of torch's computes; of another class, what it has of properties."""
    return [name for name, value in vars(kind).items() if isinstance(value, property)]


def reduced_class(kind: type) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """How a class that torch has made is pickled."""
    return _made_anew, (kind.__bases__[0], names_of_computed(kind))


def reduced_module(module: Module) -> tuple[Any, ...]:
    """How a parametrized module is pickled."""
    return copyreg.__newobj__, (type(module),), own_state(module)  # type: ignore[attr-defined]  # as pickle does


def own_state(obj: Any) -> Any:
    """What an object's ``__getstate__`` gives; that of a parametrized module's class before where torch's raises."""
    getstate = getattr(class_before(obj), "__getstate__", None)  # every object has one from Python 3.11 on
    return dict(vars(obj)) if getstate is None else getstate(obj)


def _made_anew(kind: type[Module], names: Sequence[str]) -> type:
    # Two private names of torch's, read in 2.5 to 2.13: what is public computes the tensors anew, to other bits.
    module = kind.__new__(kind)
    Module.__init__(module)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return type(module)
