"""Pickling of classes and functions that no other process can import: lambdas, local classes, cells of a notebook.

cloudpickle pickles them by value. Two additions concern objects that workers return:

* A class that the main process has sent returns as that class, not as a copy.
* A class that a worker has created returns with all its methods.
"""

import io
import types
import uuid
import weakref
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, NoReturn

from cloudpickle import CloudPickler

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
