"""Pickling of classes and functions that no other process can import: lambdas, local classes, cells of a notebook.

cloudpickle pickles them by value. Two additions concern objects that workers return:

* A class that the main process has sent returns as that class, not as a copy.
* A class that a worker has created returns with all its methods.

Also pickling of parametrized modules (:mod:`torch.nn.utils.parametrize`), such as those of ``weight_norm``. Torch
creates a class for each such module, with a property for each computed tensor, and forbids pickling of the module. All
its parts except this class can be pickled; the receiver creates the class again.
"""

import copyreg
import io
import types
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NoReturn

from cloudpickle import CloudPickler
from torch.nn import Module
from torch.nn.utils import parametrize

#: Classes that this process has sent, by key.
_sent: "weakref.WeakValueDictionary[str, type]" = weakref.WeakValueDictionary()
_keys: "weakref.WeakKeyDictionary[type, str]" = weakref.WeakKeyDictionary()
#: Keys of the classes that this process has received from the main process.
_received: "weakref.WeakKeyDictionary[type, str]" = weakref.WeakKeyDictionary()


def reduce_class(cls: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the pickle reduction of a class that the main process sends by value.

    Args:
        cls: The class.
        reduced: Reduction of the class by cloudpickle.
    """
    make, arguments, state, *items, set_state = reduced
    key = _keys.setdefault(cls, uuid.uuid4().hex)
    _sent[key] = cls
    return make, arguments, (set_state, state, key), *items, _restore_class


def reduce_returned_class(cls: type) -> tuple[Any, ...] | None:
    """Returns the pickle reduction of a class that a worker returns; None if the main process has not sent it."""
    key = _received.get(cls)
    return None if key is None else (_find_sent_class, (key, cls.__qualname__))


def functions_of(cls: type) -> Iterator[types.FunctionType]:
    """Yields the functions of a class, and those in their closures, such as the ones that decorators wrap."""
    pending = list(vars(cls).values())
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            yield value
            pending += [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        elif isinstance(value, (staticmethod, classmethod)):
            pending.append(value.__func__)
        elif isinstance(value, property):
            pending += [value.fget, value.fset, value.fdel]
        elif isinstance(value, (cached_property, partial)):
            pending.append(value.func)


def _restore_class(cls: type, state: tuple[Callable[[type, Any], None], Any, str]) -> None:
    set_state, of_class, key = state
    set_state(cls, of_class)
    _received[cls] = key


def _find_sent_class(key: str, name: str) -> type:
    try:
        return _sent[key]
    except KeyError:
        raise LookupError(
            f"An object of the class `{name}` cannot be returned from a worker: the main process has deleted the class."
            " Keep a reference to it until all results have been received."
        ) from None


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    make, arguments = CloudPickler.dispatch_table[types.CodeType](code)  # it may drop the file name
    return _restore_code, (make, arguments, code.co_filename)


def _restore_code(make: Callable[..., types.CodeType], arguments: Any, filename: str) -> types.CodeType:
    return make(*arguments).replace(co_filename=filename)


def _reject(obj: Any) -> NoReturn:
    raise TypeError(f"cannot pickle {type(obj).__name__!r} object")


def _reduce_method(method: types.MethodType) -> Any:
    return method.__reduce__()


#: Reducers that replace cloudpickle's, by type: code keeps its file name, and the other types are reduced as by pickle.
REDUCERS: dict[Any, Callable[[Any], Any]] = {
    types.CodeType: _reduce_code,
    types.MethodType: _reduce_method,
    io.TextIOWrapper: _reject,  # cloudpickle would send the contents of the file, as a file in memory
    memoryview: _reject,
}


# --- parametrized modules ---


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
