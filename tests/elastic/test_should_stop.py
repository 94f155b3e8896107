"""``trainer.should_stop`` on one rank of an elastic training ends it on all ranks, also after ranks have changed."""

import pytest

from tests.elastic.test_elastic import run_elastic
from tests.support.elastic_runs import STRATEGY, check_ends_early, run_torchrun, run_workers
from tests.support.elastic_script import end_early, joins_later, kill, once, terminate

pytestmark = pytest.mark.processes

#: A rank sets it in the second epoch, and training has to complete the third.
SET_IN_SECOND_EPOCH = once(end_early, rank=1, step=50)
KEEPS_TRAINING = {"strategy": STRATEGY, "trainer": {"min_epochs": 3}}


def test_workers_end_before_the_same_step():
    run = run_workers(2, once(end_early, rank=1, step=20), strategy=STRATEGY)
    check_ends_early(run, num_epochs=1)
    assert run.worlds == [(2, 0)]


def test_workers_agree_again_when_one_leaves_after_it_was_set():
    run = run_workers(2, SET_IN_SECOND_EPOCH, once(terminate, rank=1, step=60), joins_later, **KEEPS_TRAINING)
    check_ends_early(run, num_epochs=3)
    assert [size for size, _ in run.worlds][:2] == [2, 1]


def test_torchruns_ranks_restore_it_from_a_commit():
    run = run_torchrun(2, SET_IN_SECOND_EPOCH, once(kill, rank=0, step=70), **KEEPS_TRAINING)
    check_ends_early(run, num_epochs=3)
    assert run.worlds == [(2, 0), (2, 60)]
    assert [end["steps"] for end in run.ends] == [135, 135]


def test_horovods_ranks_end_before_the_same_step():
    pytest.importorskip("horovod")
    run = run_elastic(once(end_early, rank=1, step=20), strategy=STRATEGY)
    check_ends_early(run, num_epochs=1)
    assert run.worlds == [(2, 0)]
