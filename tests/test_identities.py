"""Identities of collectives: pairs that are errors, and their names in messages."""

import threading

import pytest

from lightning_strategies_ext.identities import (
    BATCH,
    BUCKET,
    GRADIENTS,
    IdentityKind,
    current,
    describe_identity,
    merge_identities,
)

BUFFERS = int(IdentityKind.BUFFERS)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (GRADIENTS, BUFFERS),
        (GRADIENTS + BATCH, GRADIENTS + 2 * BATCH),
        (GRADIENTS + BATCH + BUCKET, GRADIENTS + BATCH + 2 * BUCKET),
        (GRADIENTS + 7 * BATCH, BUFFERS + 7 * BATCH),
    ],
)
def test_identities_with_a_different_field_cannot_be_merged(one: int, other: int) -> None:
    assert merge_identities(one, other) is None
    assert merge_identities(other, one) is None


@pytest.mark.parametrize(
    ("one", "other", "merged"),
    [
        (0, 0, 0),
        (0, GRADIENTS + BATCH, GRADIENTS + BATCH),
        (GRADIENTS, GRADIENTS + 3 * BATCH, GRADIENTS + 3 * BATCH),
        (GRADIENTS + 3 * BATCH, GRADIENTS + BUCKET, GRADIENTS + 3 * BATCH + BUCKET),
        (BUFFERS, BUFFERS, BUFFERS),
    ],
)
def test_fields_that_are_not_stated_do_not_differ(one: int, other: int, merged: int) -> None:
    assert merge_identities(one, other) == merge_identities(other, one) == merged


@pytest.mark.parametrize(
    ("identity", "text"),
    [
        (0, ""),
        (GRADIENTS, "gradients"),
        (GRADIENTS + 3 * BATCH, "gradients of batch 2"),
        (GRADIENTS + 3 * BATCH + BUCKET, "gradients of batch 2, bucket 0"),
        (GRADIENTS + 1_000_001 * BATCH + 60_000 * BUCKET, "gradients of batch 1000000, bucket 59999"),
        (int(IdentityKind.LOGGED_VALUES) + 12345 * BATCH, "logged values"),
    ],
)
def test_descriptions_count_batches_and_buckets_from_zero(identity: int, text: str) -> None:
    assert describe_identity(identity) == text


def test_each_thread_has_its_own_current_identity() -> None:
    seen: list[int] = []
    current.identity = GRADIENTS
    try:
        thread = threading.Thread(target=lambda: seen.append(current.identity))
        thread.start()
        thread.join()
    finally:
        current.identity = 0
    assert seen == [0]
