"""Classes and functions that no other process could import, as messages: lambdas, local classes, a notebook's cells.

They travel by value, as cloudpickle writes them. Two extras, both for what comes back:

* A class that the main process has sent comes back as that class, and not as a copy of it.
* Of a class that a worker has made, all methods come along.
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
#: Classes that the main process has sent here, with their keys.
_received: "weakref.WeakKeyDictionary[type, str]" = weakref.WeakKeyDictionary()


def reduce_class(cls: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """How the main process writes a class that travels by value.

    Args:
        cls: The class.
        reduced: How cloudpickle writes it.
    """
    make, arguments, state, *items, set_state = reduced
    key = _keys.setdefault(cls, uuid.uuid4().hex)
    _sent[key] = cls
    return make, arguments, (set_state, state, key), *items, _set_up


def reduce_returned_class(cls: type) -> tuple[Any, ...] | None:
    """How a worker writes a class that the main process has sent to it; None if that has not."""
    key = _received.get(cls)
    return None if key is None else (_that_was_sent, (key, cls.__qualname__))


def functions_of(cls: type) -> Iterator[types.FunctionType]:
    """The functions that a class is made of, and those that these enclose, as a decorator's does."""
    waiting = list(vars(cls).values())
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            yield value
            waiting += [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        elif isinstance(value, (staticmethod, classmethod)):
            waiting.append(value.__func__)
        elif isinstance(value, property):
            waiting += [value.fget, value.fset, value.fdel]
        elif isinstance(value, (cached_property, partial)):
            waiting.append(value.func)


def _set_up(cls: type, state: tuple[Callable[[type, Any], None], Any, str]) -> None:
    set_state, of_class, key = state
    set_state(cls, of_class)
    _received[cls] = key


def _that_was_sent(key: str, name: str) -> type:
    try:
        return _sent[key]
    except KeyError:
        raise LookupError(f"The class `{name}` is no longer there, and an object of it came back.") from None


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    make, arguments = CloudPickler.dispatch_table[types.CodeType](code)  # which may leave the file's name out
    return _code_from, (make, arguments, code.co_filename)


def _code_from(make: Callable[..., types.CodeType], arguments: Any, filename: str) -> types.CodeType:
    return make(*arguments).replace(co_filename=filename)


def _refuse(obj: Any) -> NoReturn:
    raise TypeError(f"cannot pickle {type(obj).__name__!r} object")


def _as_pickle_does(method: types.MethodType) -> Any:
    return method.__reduce__()


#: How objects are written that cloudpickle would write otherwise than pickle, though they are not code: as pickle does.
REDUCERS: dict[Any, Callable[[Any], Any]] = {
    types.CodeType: _reduce_code,
    types.MethodType: _as_pickle_does,
    io.TextIOWrapper: _refuse,  # not what is in the file, as if it were open in memory
    memoryview: _refuse,
}
