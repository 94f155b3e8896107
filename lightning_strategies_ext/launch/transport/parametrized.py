"""Pickling of parametrized modules (:mod:`torch.nn.utils.parametrize`), such as those of ``weight_norm``.

Torch creates a class for each such module, with a property for each computed tensor, and forbids pickling of the
module. All its parts except this class can be pickled; the receiver creates the class again.
"""

import copyreg
from collections.abc import Sequence
from typing import Any

from torch.nn import Module
from torch.nn.utils import parametrize


def reduce_parametrized(obj: Any) -> Any:
    """Returns the pickle reduction of a parametrized module or its class; NotImplemented for other objects."""
    if isinstance(obj, type) and _is_created_by_torch(obj):
        return _create_class, (obj.__bases__[0], names_of_computed(obj))
    if isinstance(obj, Module) and _is_created_by_torch(type(obj)):
        return copyreg.__newobj__, (type(obj),), get_state(obj)  # type: ignore[attr-defined]  # as pickle does
    return NotImplemented


def original_class(obj: Any) -> type:
    """Returns the class of an object; for a parametrized module, the class before the parametrization."""
    kind = type(obj)
    return kind.__bases__[0] if _is_created_by_torch(kind) else kind


def names_of_computed(kind: type) -> list[str]:
    """Returns the names of the tensors that a class computes, if torch has created it for a parametrized module."""
    if not _is_created_by_torch(kind):
        return []
    return [name for name, value in vars(kind).items() if isinstance(value, property)]


def get_state(obj: Any) -> Any:
    """Returns an object's state by the ``__getstate__`` of its original class; that of a parametrized class raises."""
    getstate = getattr(original_class(obj), "__getstate__", None)  # every object has it since Python 3.11
    return dict(vars(obj)) if getstate is None else getstate(obj)


def _is_created_by_torch(kind: type) -> bool:
    getstate = vars(kind).get("__getstate__")
    return getattr(getstate, "__module__", None) == parametrize.__name__


def _create_class(kind: type[Module], names: Sequence[str]) -> type:
    # Private functions of torch, checked in 2.5 to 2.13: the public ones compute the tensors again, to different bits.
    module = kind.__new__(kind)
    Module.__init__(module)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return type(module)
