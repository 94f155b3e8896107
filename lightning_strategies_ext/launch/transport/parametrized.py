"""Modules with parametrizations (:mod:`torch.nn.utils.parametrize`): ``weight_norm``, ``orthogonal`` and their like.

Torch makes a class for each such module, with a property in the place of each tensor that is computed, and lets none of
them be pickled. All that they consist of can be, but for that class; it is made anew where it arrives.
"""

import copyreg
from collections.abc import Sequence
from typing import Any

from torch.nn import Module
from torch.nn.utils import parametrize


def reduce_parametrized(obj: Any) -> Any:
    """How a parametrized module, or its class, is pickled; NotImplemented for all else, as pickle wants it."""
    if isinstance(obj, type) and _is_made_by_torch(obj):
        return _made_anew, (obj.__bases__[0], names_of_computed(obj))
    if isinstance(obj, Module) and _is_made_by_torch(type(obj)):
        return copyreg.__newobj__, (type(obj),), get_state(obj)  # type: ignore[attr-defined]  # as pickle does
    return NotImplemented


def original_class(obj: Any) -> type:
    """The class of an object; of a parametrized module, the one that it had before."""
    kind = type(obj)
    return kind.__bases__[0] if _is_made_by_torch(kind) else kind


def names_of_computed(kind: type) -> list[str]:
    """The tensors that a class computes, if torch has made it."""
    if not _is_made_by_torch(kind):
        return []
    return [name for name, value in vars(kind).items() if isinstance(value, property)]


def get_state(obj: Any) -> Any:
    """What an object's ``__getstate__`` gives; that of a parametrized module's class before where torch's raises."""
    getstate = getattr(original_class(obj), "__getstate__", None)  # every object has one from Python 3.11 on
    return dict(vars(obj)) if getstate is None else getstate(obj)


def _is_made_by_torch(kind: type) -> bool:
    getstate = vars(kind).get("__getstate__")
    return getattr(getstate, "__module__", None) == parametrize.__name__


def _made_anew(kind: type[Module], names: Sequence[str]) -> type:
    # Two private names of torch's, read in 2.5 to 2.13: what is public computes the tensors anew, to other bits.
    module = kind.__new__(kind)
    Module.__init__(module)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return type(module)
