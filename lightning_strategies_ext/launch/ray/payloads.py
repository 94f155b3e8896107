"""Tasks and replies that are sent through Ray: a small pickle, and separate buffers that this package does not copy.

Ray takes the buffers of a :class:`RayPayload` as they are (pickle protocol 5) and writes each once to its object store;
a reader on the same host gets views of them. Classes and functions of a script or of a notebook's cell are sent by
value. In replies, they become those of the main process again.
"""

import pickle
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ray.cloudpickle import CloudPickler

from lightning_strategies_ext.launch.transport.channel import ReceivedMessage
from lightning_strategies_ext.launch.transport.memory_files import MemoryFile
from lightning_strategies_ext.launch.transport.pickling import MainByValuePickler, Pickled
from lightning_strategies_ext.launch.transport.reducers import by_value_table


class RayPickler(MainByValuePickler):
    """Pickler that also pickles Ray's own objects, for a reader without the user's ``__main__``."""

    # Ray registers reducers of its own objects in this table, above all of references to its object store.
    dispatch_table = by_value_table(CloudPickler)
    sends_descriptors = False


@dataclass
class RayPayload:
    """A pickled object that is sent through Ray.

    Attributes:
        data: The pickle.
        buffers: Memory that the pickle refers to; read-only at the receiver.
    """

    data: bytes
    buffers: list[Any] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        # Ray's own views of its memory, which a Ray Client server forwards, cannot be pickled.
        return {"data": self.data, "buffers": [pickle.PickleBuffer(_raw(buffer)) for buffer in self.buffers]}

    @classmethod
    def of(cls, pickled: Pickled) -> "RayPayload":
        """Wraps a pickled object, without a copy of its buffers."""
        return cls(pickled.data, pickled.buffers)

    def pickled(self, *, is_only_read: bool) -> Pickled:
        """Returns the pickled object, for the reader.

        Args:
            is_only_read: Whether the loaded object is only read and not kept, so that its buffers are not copied.
        """
        return Pickled(self.data, [_view(buffer) if is_only_read else bytearray(buffer) for buffer in self.buffers])

    def to_received_message(self) -> ReceivedMessage:
        """Returns a copy in memory of this worker, like a channel's message, so that changes in it can be detected."""
        if not self.buffers:
            return ReceivedMessage(Pickled(self.data))
        file = MemoryFile.write([self.data, *self.buffers])
        data, *buffers = file.map(private=True)
        return ReceivedMessage(Pickled(bytes(data), buffers), [file])


@dataclass
class ActorReply:
    """A worker's reply.

    Attributes:
        payload: The pickled reply.
        is_only_read: See :meth:`RayPayload.pickled`.
        num_output_bytes: Number of bytes of output that the worker has sent over its link before.
    """

    payload: RayPayload
    is_only_read: bool
    num_output_bytes: int

    def load(self) -> Any:
        """Unpickles the reply."""
        return self.payload.pickled(is_only_read=self.is_only_read).load()


class _WritableView:
    """Memory that NumPy treats as writable: torch warns about read-only memory, even if it is never written to."""

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
