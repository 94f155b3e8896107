"""Checks of an elastic ``fit`` before it restores a commit, without processes."""

from types import SimpleNamespace

import pytest

from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.elastic.fit import ElasticFit
from lightning_strategies_ext.elastic.membership import Member


def test_a_world_of_new_ranks_has_no_commit():
    members = [Member(Peer.this_process(rank)) for rank in range(2)]
    fit = SimpleNamespace(_membership=SimpleNamespace(members=members), _fit_number=1)
    ElasticFit._check_is_same_fit(fit)
    with pytest.raises(RuntimeError, match=r"There is no commit to restore: .* all ranks with a commit were lost"):
        ElasticFit._restore_newest_commit(fit)
