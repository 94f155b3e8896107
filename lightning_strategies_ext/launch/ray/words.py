"""What a worker and the main process say over a line in the middle of a job: the protocol's short messages, as JSON.

Nothing that comes over a line is unpickled: whoever got into the network between hosts could run code by that.
"""

import json
from dataclasses import asdict

from lightning_strategies_ext.elastic.membership import Member
from lightning_strategies_ext.launch.protocol import Arrived, Members, Notice, Place, Ready

#: Those of them that the main process says. All else it says by a call of the actor.
SAID_TO_WORKERS = (Place, Members, Notice)

Word = Ready | Arrived | Place | Members | Notice


def encoded(word: Word) -> bytes:
    """As it goes over a line."""
    if isinstance(word, Arrived):
        return _dump("Arrived", asdict(word.member))
    if isinstance(word, Members):
        return _dump("Members", None if word.members is None else [asdict(member) for member in word.members])
    return _dump(type(word).__name__, vars(word))


def decoded(data: bytes) -> Word:
    """The reverse of :func:`encoded`.

    Raises:
        ValueError: If it is none of them.
    """
    name, said = json.loads(data)
    if name == "Ready":
        return Ready(**said)
    if name == "Arrived":
        return Arrived(Member.of(said))
    if name == "Place":
        store = said.pop("store")
        return Place(**said, store=store if isinstance(store, str) else tuple(store))
    if name == "Members":
        return Members(None if said is None else [Member.of(member) for member in said])
    if name == "Notice":
        return Notice()
    raise ValueError(f"{name!r} is said by nobody")


def _dump(name: str, said: object) -> bytes:
    return json.dumps([name, said]).encode()
