"""Transfer of objects between processes: tensors outside of the pickle, shared objects as references."""

import errno
import os
import pickle
import socket
import threading
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from lightning_strategies_ext._system.frames import FrameTooLongError
from lightning_strategies_ext.launch.tasks.object_changes import OwnState
from lightning_strategies_ext.launch.transport import channel, memory_files
from lightning_strategies_ext.launch.transport.channel import Channel, PreparedMessage, ReceivedMessage
from lightning_strategies_ext.launch.transport.memory_files import MemoryFile, ReceivedBuffers
from lightning_strategies_ext.launch.transport.pickling import SharedObjects, dump


def transfer(obj: Any, **kwargs: Any) -> Any:
    """Returns an object as a receiver rebuilds it, in separate memory."""
    pickled = dump(obj, **kwargs)
    pickled.buffers = [bytearray(buffer) for buffer in pickled.buffers]
    return pickled.load(kwargs.get("shared"))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(10)[2:7:2],
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.arange(5, dtype=torch.int8),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.bfloat16),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, requires_grad=True),
        torch.nn.Parameter(torch.randn(3)),
        torch.randn(3, 3).to_sparse(),
        torch.ones(3).expand(2, 3),
        torch.empty(3, device="meta"),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.dtype}-{tensor.layout}-{tensor.device}",
)
@pytest.mark.parametrize("is_return", [False, True])
def test_tensors_arrive_unchanged(tensor, is_return):
    arrived = transfer(tensor, is_return=is_return)
    assert type(arrived) is type(tensor)
    assert (arrived.dtype, arrived.shape, arrived.device) == (tensor.dtype, tensor.shape, tensor.device)
    assert arrived.requires_grad == tensor.requires_grad
    if tensor.device.type != "meta":
        assert torch.equal(arrived.to_dense().resolve_conj(), tensor.to_dense().resolve_conj())
    if tensor.layout == torch.strided and not is_return:
        assert arrived.stride() == tensor.stride()


def test_memory_is_not_in_the_pickle():
    pickled = dump({"tensor": torch.ones(1 << 20), "array": np.ones(1 << 17)})
    assert len(pickled.data) < 1000
    assert sum(memoryview(buffer).nbytes for buffer in pickled.buffers) == 5 << 20


def test_tensors_that_share_memory_share_it_afterwards():
    whole = torch.zeros(6)
    arrived = transfer({"whole": whole, "part": whole[2:4], "parameter": torch.nn.Parameter(whole)})
    arrived["part"].fill_(7)
    assert arrived["whole"].tolist() == [0, 0, 7, 7, 0, 0]
    assert arrived["parameter"].tolist() == [0, 0, 7, 7, 0, 0]


def test_a_small_view_returns_without_the_rest_of_its_storage():
    view = torch.zeros(1 << 20)[5:7]
    assert sum(memoryview(buffer).nbytes for buffer in dump(view, is_return=True).buffers) == view.nbytes
    assert sum(memoryview(buffer).nbytes for buffer in dump(view).buffers) == 4 << 20


def test_shared_objects_are_those_of_the_receiver():
    module = torch.nn.Linear(2, 2)
    of_sender = SharedObjects([module, module.weight])
    of_receiver = SharedObjects(["the module", "the weight"])
    sent = dump({"module": module, "weights": [module.weight], "bias": module.bias}, of_sender)
    arrived = sent.load(of_receiver)
    assert arrived["module"] == "the module"
    assert arrived["weights"] == ["the weight"]
    assert torch.equal(arrived["bias"], module.bias)


def test_an_object_that_must_not_be_sent_raises():
    loader = torch.utils.data.DataLoader([1])
    shared = SharedObjects([loader], never=(torch.utils.data.DataLoader,))
    assert dump([loader], shared).load(shared)[0] is loader
    with pytest.raises(pickle.PicklingError, match="DataLoader stays"):
        dump([torch.utils.data.DataLoader([1])], shared)


def test_a_returned_function_that_cannot_be_imported_raises_when_it_is_called():
    def local(x: int) -> int:
        return x

    sent = dump({"local": local, "function": transfer}, is_return=True)
    arrived = sent.load()
    assert arrived["function"] is transfer
    with pytest.raises(RuntimeError, match=r"local` was created in a worker process"):
        arrived["local"](1)
    with pytest.raises(RuntimeError, match=r"local` was created in a worker process"):
        dump(arrived).load()["local"](1)  # it can be sent to the next worker
    assert dump(local).load()(1) == 1  # to a worker, it is sent by value


def channels() -> tuple[Channel, Channel]:
    first, second = socket.socketpair()
    return Channel(first), Channel(second)


@pytest.mark.parametrize("size", [1, 1 << 14, 1 << 22])
def test_a_message_of_any_size_arrives(size):
    sender, receiver = channels()
    message = {"text": "x" * size, "tensor": torch.arange(size)}
    thread = threading.Thread(target=sender.send, args=(message,))
    thread.start()
    arrived = receiver.receive()
    thread.join()
    assert arrived["text"] == message["text"]
    assert torch.equal(arrived["tensor"], message["tensor"])
    sender.send("x" * size)
    assert receiver.receive() == "x" * size
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive()


@pytest.mark.parametrize("shape", [0, (0, 4)])
def test_an_array_without_elements_arrives(shape):
    sender, receiver = channels()
    for message in ([np.ones(3), np.empty(shape)], [np.empty(shape), torch.ones(3)]):
        sender.send(message)
        for arrived, sent in zip(receiver.receive(), message, strict=True):
            assert np.array_equal(arrived, sent)
            assert arrived.shape == sent.shape


def test_receivers_of_one_message_do_not_see_writes_of_each_other():
    prepared = PreparedMessage(dump(torch.zeros(3)))
    arrived = []
    for _ in range(2):
        sender, receiver = channels()
        prepared.send(sender)
        message = receiver.receive_message(private=True)
        arrived.append((message, message.open()))
    prepared.close()
    (first_message, first), (_, second) = arrived
    received = ReceivedBuffers(first_message.files)
    assert received.is_unchanged(first)
    first.fill_(5)
    assert second.tolist() == [0, 0, 0]
    assert not received.is_unchanged(first)
    assert not received.is_unchanged(torch.zeros(3))
    first.zero_()
    assert received.is_unchanged(first)
    first_message.close()
    assert not received.is_unchanged(first)  # its memory file is closed


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_receivers_on_this_host_share_tensors_in_shared_memory(strategy):
    sharing_strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        sent = [torch.zeros(3).share_memory_() for _ in range(300)]  # more than fit into one message of a socket
        prepared = PreparedMessage(dump([sent, sent[7][1:], torch.ones(2)]))
        arrived = []
        for _ in range(2):
            sender, receiver = channels()
            thread = threading.Thread(target=prepared.send, args=(sender,))
            thread.start()
            arrived.append(receiver.receive())
            thread.join()
        prepared.close()
    finally:
        torch.multiprocessing.set_sharing_strategy(sharing_strategy)
    (first, view, _), (second, _, unshared) = arrived
    for number, tensor in enumerate(first):
        tensor += number
    view += 1
    assert sent[7].tolist() == second[7].tolist() == [7, 8, 8]
    assert [tensor[0].item() for tensor in sent] == [tensor[0].item() for tensor in second] == list(range(300))
    assert second[7].is_shared()
    assert not unshared.is_shared()


def test_a_returned_tensor_is_in_shared_memory_again():
    shared = torch.ones(3).share_memory_()
    first, second = transfer([shared, shared[1:]], is_return=True)
    first += 1
    assert second.tolist() == [2, 2]
    assert first.is_shared()
    assert shared.tolist() == [1, 1, 1]


def test_a_temporary_file_is_used_if_memory_is_full(monkeypatch, tmp_path):
    def full(fd: int, data: Any) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    write = os.write
    monkeypatch.setattr(os, "write", full)
    before = len(os.listdir("/proc/self/fd"))
    file = MemoryFile.write([b"abc", bytearray(range(100))])
    assert [bytes(view) for view in file.map(private=True)] == [b"abc", bytes(range(100))]
    file.close()
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before


def received_with_buffers(obj: Any) -> tuple[ReceivedMessage, Any]:
    """Returns an object as a worker receives it over a channel, with its message."""
    sender, receiver = map(Channel, socket.socketpair())
    prepared = PreparedMessage(dump(obj))
    prepared.send(sender)
    message = receiver.receive_message(private=True)
    for end in (prepared, sender, receiver):
        end.close()
    return message, message.open()


def test_a_tensor_of_a_part_of_an_uneven_storage_is_compared() -> None:
    message, received = received_with_buffers([torch.arange(10, dtype=torch.uint8)])
    part = received[0][:8].view(torch.float32)
    assert ReceivedBuffers(message.files).is_unchanged(part)
    part[0] += 1
    assert not ReceivedBuffers(message.files).is_unchanged(part)


def test_a_message_that_announces_too_much_is_refused() -> None:
    sender, receiver = map(Channel, socket.socketpair())
    sender.socket.sendall(b"\0\xff\xff\xff\xff")
    with pytest.raises(FrameTooLongError, match="longer than the maximum"):
        receiver.receive()
    sender.close()
    receiver.close()


def test_a_message_larger_than_the_free_memory_is_sent_through_a_file(monkeypatch, caplog) -> None:
    monkeypatch.setattr(memory_files, "free_memory", lambda: 1 << 20)
    monkeypatch.setattr(memory_files, "_has_logged_fallback", False)
    (tensor,) = received_with_buffers([torch.arange(1 << 24)])[1]
    assert torch.equal(tensor, torch.arange(1 << 24))
    assert "bytes are needed, and 1,048,576 are free" in caplog.text


def test_a_message_that_cannot_be_prepared_leaves_no_descriptor(monkeypatch) -> None:
    def raise_too_many(handle: Any) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(channel, "locate", raise_too_many)
    pickled = dump([torch.zeros(10).share_memory_(), torch.ones(10)])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError, match="too many open files"):
            PreparedMessage(pickled)
    assert len(os.listdir("/proc/self/fd")) == before


class RefusesState:
    def __setstate__(self, state: Any) -> None:
        raise ValueError("not this state")


class RefusingSet(RefusesState, set):
    pass


class RefusingDeque(RefusesState, deque):
    pass


class RefusingList(RefusesState, list):
    pass


@pytest.mark.parametrize("kind", [RefusingSet, RefusingDeque, RefusingList])
def test_an_object_that_cannot_be_restored_keeps_its_elements(kind: type) -> None:
    obj = kind([1, 2, 3])
    with pytest.raises(ValueError, match="not this state"):
        OwnState({"new": 2}, []).restore(obj)
    assert list(obj) == [1, 2, 3]
    assert vars(obj) == {}
