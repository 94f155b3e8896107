"""Messages between the main process and workers: each message uses its channel or link."""

import socket
from dataclasses import is_dataclass
from typing import Any, get_args

import pytest
import torch

from lightning_strategies_ext._system.frames import FrameDecoder, encode_frame
from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.elastic.membership import Member
from lightning_strategies_ext.failure.rank_status import Failure
from lightning_strategies_ext.launch import protocol
from lightning_strategies_ext.launch.processes.process_settings import ProcessSettings, RngState
from lightning_strategies_ext.launch.protocol import (
    EncodedValue,
    EndOfResults,
    FunctionResult,
    JoinedWorld,
    JoinPending,
    LinkMessageToMain,
    LinkMessageToWorker,
    MessageToWorker,
    PeerLost,
    Ping,
    Pong,
    PredictionChunk,
    PredictionPlan,
    PullResult,
    RankAssignment,
    ReadyToJoin,
    RunTask,
    SaveState,
    SendSignal,
    Shutdown,
    StageDiff,
    StateSaved,
    TaskDone,
    TaskFailed,
    TensorChunk,
    WorkerHostInfo,
    WorkerOutput,
    WorkerRankInfo,
    WorkerSetup,
    WorldMembers,
)
from lightning_strategies_ext.launch.ray.worker_link import LinkServer, WorkerLink, decode_message, encode_message
from lightning_strategies_ext.launch.transport.channel import Channel
from lightning_strategies_ext.launch.transport.pickling import dump
from tests.launch.link_connections import connect, wait_for

MEMBERS = [
    Member(Peer(rank, "host", 7, 0.5, "name", ("10.0.0.1",)), fit_number=1, committed_batches=4) for rank in range(2)
]
VALUE = EncodedValue(dump([1, "two"]), [])
TO_WORKER: list[Any] = [
    WorkerSetup(1, {"name": "worker"}, WorkerRankInfo(1, 2, 0, 1, 1, 2, "10.0.0.1", 80)),
    Ping(),
    RunTask(ProcessSettings("/", {"A": "b"}, RngState.now(), 1), is_continuation=True, is_joining=True),
    PullResult(),
    SaveState("/file"),
    Shutdown(),
    RankAssignment(1, 2, 3, ("10.0.0.1", 80)),
    RankAssignment(None, store="name"),
    WorldMembers(MEMBERS),
    WorldMembers(None),
    JoinPending(),
]
TO_MAIN: list[Any] = [
    Pong(),
    TaskDone(RngState.now()),
    TaskFailed(None, "ValueError: no", "text", 1.5, False, True, Failure((1,), "host", 2.0, "fit", "it failed")),
    StateSaved(),
    TensorChunk({("weight", torch.Size([3]), None): torch.arange(3.0)}),
    StageDiff([(1, VALUE.value)], [(2, "name", VALUE), (3, "other", None)], VALUE, {"net": True}, {}, None, None),
    PredictionPlan([[[0, 2], [4]]], [2]),
    PredictionChunk([dump(torch.ones(2))]),
    FunctionResult({"loss": 1.5}),
    EndOfResults(),
    ReadyToJoin("lost rank 1"),
    ReadyToJoin(),
    JoinedWorld(MEMBERS[0]),
]
LINK_TO_WORKER: list[Any] = [*TO_WORKER[-5:], SendSignal(12), PeerLost(3)]
LINK_TO_MAIN: list[Any] = [*TO_MAIN[-3:]]


def test_the_cases_are_all_messages() -> None:
    classes = {cls for cls in vars(protocol).values() if is_dataclass(cls) and cls.__module__ == protocol.__name__}
    to_worker = {*get_args(MessageToWorker), *get_args(LinkMessageToWorker)}
    assert {*map(type, TO_WORKER)} == {*get_args(MessageToWorker)}
    assert {*map(type, TO_MAIN), WorkerOutput} == classes - to_worker - {WorkerRankInfo, WorkerHostInfo, EncodedValue}
    assert {*map(type, LINK_TO_WORKER)} == {*get_args(LinkMessageToWorker)}
    assert {*map(type, LINK_TO_MAIN), WorkerOutput} == {*get_args(LinkMessageToMain)}
    assert not to_worker & {*map(type, TO_MAIN), WorkerOutput}, "each message has one direction"


@pytest.mark.parametrize("message", [*TO_WORKER, *TO_MAIN], ids=lambda message: type(message).__name__)
def test_a_message_passes_through_a_channel(message: Any) -> None:
    sender, receiver = map(Channel, socket.socketpair())
    sender.send(message)
    received = receiver.receive()
    assert type(received) is type(message)
    if not isinstance(message, (StageDiff, PredictionChunk)):
        assert repr(received) == repr(message)
    elif isinstance(message, StageDiff):
        assert received.attributes[0][2].value.load() == [1, "two"]
        assert (received.attributes[1], received.modes) == ((3, "other", None), {"net": True})
    else:
        assert torch.equal(received.outputs[0].load(), torch.ones(2))
    sender.close()
    receiver.close()


def test_messages_pass_through_a_link(capsys: pytest.CaptureFixture[str]) -> None:
    server = LinkServer("127.0.0.1")
    link: WorkerLink = server.expect(1, lambda: None)
    with connect(server, 1) as worker:
        wait_for(lambda: link.connection is not None)
        frames = FrameDecoder()
        for message in LINK_TO_WORKER:
            link.send(message)
            received: list[Any] = []
            while not received:
                received += [decode_message(*frame) for frame in frames.decode(worker.recv(1 << 16))]
            assert received == [message]
        for message in (*LINK_TO_MAIN, WorkerOutput(False, "naïve".encode()), WorkerOutput(True, b"to stderr")):
            worker.sendall(encode_message(message))
        link.wait_for_output(len("naïve".encode()) + len(b"to stderr"))
        assert list(link.messages) == LINK_TO_MAIN
        assert capsys.readouterr() == ("naïve", "to stderr")
    server.close()


@pytest.mark.parametrize(
    "frame",
    [
        encode_frame(b'["RunTask", {}]', 3),
        encode_message(SendSignal(9)),
        encode_frame(b"[]", 9),
        b"\0\xff\xff\xff\xff",
    ],
    ids=["not for a link", "not for the main process", "unknown kind", "too long"],
)
def test_a_link_that_sends_invalid_data_is_closed(frame: bytes) -> None:
    server = LinkServer("127.0.0.1")
    link = server.expect(1, lambda: None)
    with connect(server, 1) as worker:
        wait_for(lambda: link.connection is not None)
        worker.sendall(frame)
        assert link.closed.wait(60)
        assert worker.recv(1) == b""
    server.close()
