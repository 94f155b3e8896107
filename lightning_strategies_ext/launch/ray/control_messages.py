"""JSON encoding of the messages that a worker and the main process exchange over a link while a task runs.

Data from a link is never unpickled: otherwise a process with access to the network between hosts could run code.
"""

import json
from dataclasses import asdict

from lightning_strategies_ext.elastic.membership import Member
from lightning_strategies_ext.launch.protocol import JoinedWorld, JoinPending, RankAssignment, ReadyToJoin, WorldMembers

#: Messages that the main process sends over the link. It sends all others by calls of the actor.
MESSAGES_TO_WORKERS = (RankAssignment, WorldMembers, JoinPending)

ControlMessage = ReadyToJoin | JoinedWorld | RankAssignment | WorldMembers | JoinPending


def encode(message: ControlMessage) -> bytes:
    """Returns a message as bytes."""
    if isinstance(message, JoinedWorld):
        return _dump("JoinedWorld", asdict(message.member))
    if isinstance(message, WorldMembers):
        return _dump(
            "WorldMembers", None if message.members is None else [asdict(member) for member in message.members]
        )
    return _dump(type(message).__name__, vars(message))


def decode(data: bytes) -> ControlMessage:
    """Returns the message that :func:`encode` has encoded.

    Raises:
        ValueError: If the data is none of the messages.
    """
    name, fields = json.loads(data)
    if name == "ReadyToJoin":
        return ReadyToJoin(**fields)
    if name == "JoinedWorld":
        return JoinedWorld(Member.of(fields))
    if name == "RankAssignment":
        store = fields.pop("store")
        return RankAssignment(**fields, store=store if isinstance(store, str) else tuple(store))
    if name == "WorldMembers":
        return WorldMembers(None if fields is None else [Member.of(member) for member in fields])
    if name == "JoinPending":
        return JoinPending()
    raise ValueError(f"unknown control message {name!r}")


def _dump(name: str, fields: object) -> bytes:
    return json.dumps([name, fields]).encode()
