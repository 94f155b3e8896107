"""Checks of an elastic ``fit`` before it restores a commit, without processes."""

import re
from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor

from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.elastic.callback_attributes import plain_attributes_of, set_plain_attributes
from lightning_strategies_ext.elastic.fit import ElasticFit
from lightning_strategies_ext.elastic.membership import Member
from lightning_strategies_ext.exceptions import JoinError


def test_a_world_of_new_ranks_has_no_commit():
    members = [Member(Peer.this_process(rank)) for rank in range(2)]
    fit = SimpleNamespace(_membership=SimpleNamespace(members=members), _fit_number=1)
    ElasticFit._check_is_same_fit(fit)
    with pytest.raises(RuntimeError, match=r"There is no commit to restore: .* all ranks with a commit were lost"):
        ElasticFit._restore_newest_commit(fit)


def test_a_rank_that_joins_gets_the_attributes_of_its_callbacks():
    found = plain_attributes_of([EarlyStopping("loss", min_delta=0.5), LearningRateMonitor()])
    own = [EarlyStopping("loss", min_delta=0.2), LearningRateMonitor()]
    set_plain_attributes(own, found)
    assert own[0].min_delta == found[0][1]["min_delta"] != 0.2
    message = re.escape("it has other callbacks: ['EarlyStopping'], and the other ranks have ['EarlyStopping', 'Learn")
    with pytest.raises(JoinError, match=message):
        set_plain_attributes(own[:1], found)
