"""Identities of collectives: what a rank exchanges, as one number that ranks can compare within the exchange.

Ranks pair collectives by their order. If one rank leaves out a collective, for example a backward pass, its next one
pairs with the omitted one, and a wrong result is computed without an error. An identity states the kind of the exchange
and, for gradients, the number of the batch in the epoch and the bucket. The process group ``shm`` compares the
identities of all ranks before it uses their data.

The code that starts a collective sets :attr:`Current.identity` of its thread, which the process group reads.
Collectives without an identity, such as those of a user, and fields that are 0 are not compared.

    before = current.identity
    current.identity = GRADIENTS + BATCH * 12 + BUCKET * 3
    try:
        group.allreduce(...)
    finally:
        current.identity = before
"""

import threading
from enum import IntEnum
from typing import Final


class IdentityKind(IntEnum):
    """What a collective exchanges."""

    GRADIENTS = 1
    BUFFERS = 2
    VALUES = 3
    LOGGED_VALUES = 4


#: Identity of gradients whose batch and bucket are not stated.
GRADIENTS: Final = int(IdentityKind.GRADIENTS)
#: Added to an identity once per bucket, counted from 1, and once per batch, counted from 1.
BUCKET: Final = 1 << 8
BATCH: Final = 1 << 24
#: Bits of an identity: kind, bucket, batch; ``all_reduce.c`` has the same masks.
FIELDS: Final = (BUCKET - 1, BATCH - BUCKET, (1 << 64) - BATCH)


class Current(threading.local):
    """Identity of the collectives that a thread starts.

    Attributes:
        identity: The identity; 0 if it is unknown.
    """

    identity: int = 0


current: Final = Current()


def merge_identities(known: int, identity: int) -> int | None:
    """Returns the fields of two identities together, or None if a field differs; a field that is 0 does not differ."""
    for mask in FIELDS:
        one, other = known & mask, identity & mask
        if one and other and one != other:
            return None
        known |= other
    return known


def describe_identity(identity: int) -> str:
    """Returns an identity as part of a sentence, such as "gradients of batch 2, bucket 0"; empty if it is unknown."""
    kind, bucket, batch = (identity & mask for mask in FIELDS)
    if not kind:
        return ""
    text = IdentityKind(kind).name.lower().replace("_", " ")
    if kind == GRADIENTS and batch:
        text += f" of batch {batch // BATCH - 1}"
    if kind == GRADIENTS and bucket:
        text += f", bucket {bucket // BUCKET - 1}"
    return text
