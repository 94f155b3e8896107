"""Jobs and answers on their way through Ray: a small pickle, and the memory beside it without a copy of ours.

Ray takes the buffers of a :class:`RayPayload` as they are (pickle protocol 5) and writes them to its object store, once
each; a reader on the same host gets views of them there. What is defined in a script or in a notebook's cell travels by
value, and comes back as what the main process has.
"""

import pickle
from collections import ChainMap
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ray.cloudpickle import CloudPickler

from lightning_strategies_ext.launch.transport import by_value
from lightning_strategies_ext.launch.transport.channel import ReceivedMessage
from lightning_strategies_ext.launch.transport.memory_files import MemoryFile
from lightning_strategies_ext.launch.transport.pickling import MainByValuePickler, Pickled, SharedObjects, dump_with

# Ray registers there how its own objects are written, references to data in its store above all.
_REDUCERS = ChainMap(by_value.REDUCERS, CloudPickler.dispatch_table)


class _Pickler(MainByValuePickler):
    dispatch_table = _REDUCERS
    sends_descriptors = False


def dump_for_ray(
    obj: Any,
    shared: SharedObjects | None = None,
    is_return: bool = False,
    received_objects: dict[int, Any] | None = None,
) -> Pickled:
    """:func:`.pickling.dump` for a reader that has no ``__main__`` of the user's, with objects of Ray's own."""
    return dump_with(_Pickler, obj, shared, is_return, received_objects)


@dataclass
class RayPayload:
    """A pickled object on its way through Ray.

    Attributes:
        data: The pickle.
        buffers: Memory that it refers to; read only where it arrives.
    """

    data: bytes
    buffers: list[Any] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        # Ray's own views of its memory, which a server of Ray Client sends on, cannot be pickled.
        return {"data": self.data, "buffers": [pickle.PickleBuffer(_raw(buffer)) for buffer in self.buffers]}

    @classmethod
    def of(cls, pickled: Pickled) -> "RayPayload":
        """Without a copy of what it refers to."""
        return cls(pickled.data, pickled.buffers)

    def pickled(self, *, is_only_read: bool) -> Pickled:
        """As it was, for the reader.

        Args:
            is_only_read: Whether nobody keeps what is loaded, so that it may stay where it arrived.
        """
        return Pickled(self.data, [_view(buffer) if is_only_read else bytearray(buffer) for buffer in self.buffers])

    def to_received_message(self) -> ReceivedMessage:
        """For a worker: in memory of its own, as a message over a channel would be, to tell what changes in it."""
        if not self.buffers:
            return ReceivedMessage(Pickled(self.data))
        file = MemoryFile.write([self.data, *self.buffers])
        mapping = file.map(private=True)
        data, *buffers = mapping.buffers(file.spans)
        return ReceivedMessage(Pickled(bytes(data), buffers), [(file, mapping)])


@dataclass
class ActorReply:
    """A worker's answer.

    Attributes:
        payload: The answer.
        is_only_read: See :meth:`RayPayload.pickled`.
        num_output_bytes: What has gone over the line before, in bytes.
    """

    payload: RayPayload
    is_only_read: bool
    num_output_bytes: int

    def load(self) -> Any:
        """Rebuilds the answer."""
        return self.payload.pickled(is_only_read=self.is_only_read).load()


class _WritableView:
    """Memory that NumPy takes for writable; torch warns of any other, though all that is done is to read it."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        address, _ = np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"]
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (memoryview(buffer).nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _view(buffer: Any) -> Any:
    array: Any = np.asarray(_WritableView(buffer))
    return memoryview(array)


def _raw(buffer: Any) -> Any:
    return buffer.raw() if isinstance(buffer, pickle.PickleBuffer) else buffer
