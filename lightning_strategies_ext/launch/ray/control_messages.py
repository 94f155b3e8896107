"""What a worker and the main process say over a line in the middle of a job: the protocol's short messages, as JSON.

Nothing that comes over a line is unpickled: whoever got into the network between hosts could run code by that.
"""

import json
from dataclasses import asdict

from lightning_strategies_ext.elastic.membership import Member
from lightning_strategies_ext.launch.protocol import JoinedWorld, JoinPending, RankAssignment, ReadyToJoin, WorldMembers

#: Those of them that the main process says. All else it says by a call of the actor.
MESSAGES_TO_WORKERS = (RankAssignment, WorldMembers, JoinPending)

ControlMessage = ReadyToJoin | JoinedWorld | RankAssignment | WorldMembers | JoinPending


def encode(message: ControlMessage) -> bytes:
    """As it goes over a line."""
    if isinstance(message, JoinedWorld):
        return _dump("JoinedWorld", asdict(message.member))
    if isinstance(message, WorldMembers):
        return _dump(
            "WorldMembers", None if message.members is None else [asdict(member) for member in message.members]
        )
    return _dump(type(message).__name__, vars(message))


def decode(data: bytes) -> ControlMessage:
    """The reverse of :func:`encode`.

    Raises:
        ValueError: If it is none of them.
    """
    name, said = json.loads(data)
    if name == "ReadyToJoin":
        return ReadyToJoin(**said)
    if name == "JoinedWorld":
        return JoinedWorld(Member.of(said))
    if name == "RankAssignment":
        store = said.pop("store")
        return RankAssignment(**said, store=store if isinstance(store, str) else tuple(store))
    if name == "WorldMembers":
        return WorldMembers(None if said is None else [Member.of(member) for member in said])
    if name == "JoinPending":
        return JoinPending()
    raise ValueError(f"{name!r} is said by nobody")


def _dump(name: str, said: object) -> bytes:
    return json.dumps([name, said]).encode()
