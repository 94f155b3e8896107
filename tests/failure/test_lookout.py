"""Ranks that go on without a lost one hear of it, whoever they wait for. A lost host is tried in tests/elastic."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.failure.lookout import Lookout

NUM_RANKS = 3
LIMIT_S = 60.0


@contextmanager
def lookouts() -> Iterator[tuple[list[Lookout], list[threading.Event]]]:
    """Of some ranks, all in this process, and whether each has been cut off."""
    store, are_cut_off = dist.HashStore(), [threading.Event() for _ in range(NUM_RANKS)]
    peers = {rank: Peer.this_process(rank) for rank in range(NUM_RANKS)}
    made = [Lookout(store, peers, rank, is_cut_off.set) for rank, is_cut_off in enumerate(are_cut_off)]
    try:
        yield made, are_cut_off
    finally:
        for one in made:
            one.close()


def test_who_ends_without_a_word_cuts_all_others_off():
    for lost in range(NUM_RANKS):
        with lookouts() as (made, are_cut_off):
            made[lost].close(agreed=False)
            for rank in {*range(NUM_RANKS)} - {lost}:
                assert are_cut_off[rank].wait(LIMIT_S)
            assert not are_cut_off[lost].is_set()


def test_nobody_is_cut_off_who_leaves_with_the_others():
    with lookouts() as (made, are_cut_off):
        made[1].close()
        made[1].close()
        assert not any(is_cut_off.wait(0.5) for is_cut_off in are_cut_off)
