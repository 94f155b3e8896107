"""Frames in which messages of the protocol travel over a link between the main process and a worker on Ray."""

import json
from dataclasses import asdict

from lightning_strategies_ext._system.frames import encode_frame
from lightning_strategies_ext.elastic.membership import Member
from lightning_strategies_ext.launch.protocol import (
    JoinedWorld,
    JoinPending,
    LinkMessage,
    PeerLost,
    RankAssignment,
    ReadyToJoin,
    SendSignal,
    WorkerOutput,
    WorldMembers,
)

_STDOUT, _STDERR, _JSON = 1, 2, 3
_FROM_FIELDS = {kind.__name__: kind for kind in (ReadyToJoin, RankAssignment, JoinPending, SendSignal, PeerLost)}


def encode_message(message: LinkMessage) -> bytes:
    """Returns the frame of a message."""
    if isinstance(message, WorkerOutput):
        return encode_frame(message.data, _STDERR if message.is_error else _STDOUT)
    return encode_frame(json.dumps([type(message).__name__, asdict(message)]).encode(), _JSON)


def decode_message(kind: int, data: bytes) -> LinkMessage:
    """Returns the message in a frame of :func:`encode_message`.

    Data from a link is never unpickled: otherwise a process with access to the network between hosts could run code.

    Args:
        kind: Kind of the frame.
        data: Contents of the frame.

    Raises:
        ValueError: If the frame contains no message.
    """
    if kind in (_STDOUT, _STDERR):
        return WorkerOutput(kind == _STDERR, data)
    name, fields = json.loads(data) if kind == _JSON else (str(kind), {})
    if name == "JoinedWorld":
        return JoinedWorld(Member.from_dict(fields["member"]))
    if name == "WorldMembers":
        return WorldMembers(fields["members"] and [Member.from_dict(member) for member in fields["members"]])
    if name not in _FROM_FIELDS:
        raise ValueError(f"unknown message {name!r}")
    if name == "RankAssignment" and isinstance(fields["store"], list):
        fields["store"] = tuple(fields["store"])
    message: LinkMessage = _FROM_FIELDS[name](**fields)
    return message
