"""Functions in lockstep run an action once or raise an error, sequentially and concurrently, and never deadlock."""

import sys
import threading
from contextlib import suppress

import pytest

from lightning_strategies_ext.replication.lockstep import Lockstep


@pytest.fixture(params=[True, False], ids=["sequential", "concurrent"])
def lockstep(request):
    threads = threading.active_count()
    lockstep = Lockstep(3, request.param)
    yield lockstep
    lockstep.close()
    for thread in threading.enumerate():
        if thread.name.startswith("replica "):
            thread.join(5)
    assert threading.active_count() == threads


def run(lockstep, function):
    return lockstep.run([lambda each=each: function(each) for each in lockstep.participants])


def test_an_action_of_all_replicas_runs_once_on_the_callers_thread(lockstep):
    callers = []

    def action(payloads):
        callers.append(threading.current_thread())
        return sum(payloads)

    def function(participant):
        total = participant.run_once("sum", action, participant.index)
        return participant.run_once("sum", action, total + participant.index), threading.current_thread().name

    own_thread = threading.current_thread()
    assert run(lockstep, function) == [(12, own_thread.name), (12, "replica 1"), (12, "replica 2")]
    assert callers == [own_thread] * 2


def test_sequential_replicas_without_a_common_action_need_no_thread():
    lockstep = Lockstep(3, is_sequential=True)
    threads = threading.active_count()
    assert run(lockstep, lambda each: (each.index, threading.active_count())) == [(i, threads) for i in range(3)]


def test_sequential_functions_run_in_order():
    lockstep = Lockstep(3, is_sequential=True)
    order = []

    def function(participant):
        for part in "ab":
            order.append((part, participant.index))
            participant.run_once("part", lambda payloads: None)

    run(lockstep, function)
    assert order == [(part, index) for part in "ab" for index in range(3)]
    lockstep.close()


def test_concurrent_functions_run_at_the_same_time():
    lockstep = Lockstep(3, is_sequential=False)
    barrier = threading.Barrier(3)
    assert sorted(run(lockstep, lambda participant: barrier.wait(10))) == [0, 1, 2]
    lockstep.close()


def test_an_action_can_run_functions_on_the_threads_that_wait_for_it(lockstep):
    def function(participant):
        def inner():
            return participant.run_once("inner", sum, 1) + participant.index

        return participant.run_once("outer", lockstep.run_nested, inner)

    assert run(lockstep, function) == [[3, 4, 5]] * 3


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_unwinds_the_others_and_is_raised(lockstep, failing):
    unwound = []

    def function(participant):
        if participant.index == failing:
            raise ValueError("bad")
        try:
            participant.run_once("never", lambda payloads: None)
        finally:
            unwound.append(participant.index)
            participant.run_once("never", lambda payloads: None)

    with pytest.raises(ValueError, match="bad"):
        run(lockstep, function)
    assert set(unwound) <= {0, 1, 2} - {failing}
    assert run(lockstep, lambda participant: participant.run_once("again", sum, 1)) == [3, 3, 3]


def test_an_exception_of_an_action_is_raised_in_all_functions(lockstep):
    def function(participant):
        with pytest.raises(ZeroDivisionError):
            participant.run_once("division", lambda payloads: 1 // 0)
        return participant.run_once("sum", sum, 1)

    assert run(lockstep, function) == [3, 3, 3]


def test_an_interrupt_unwinds_all(lockstep):
    def interrupt(payloads):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(lockstep, lambda participant: participant.run_once("interrupt", interrupt))
    assert run(lockstep, lambda participant: participant.index) == [0, 1, 2]


def test_a_replica_that_waits_after_the_first_has_returned_is_named(lockstep):
    with pytest.raises(RuntimeError, match=r"replica 0 has returned, .*replica 1 waits in late"):
        run(lockstep, lambda participant: participant.index and participant.run_once("late", sum, 1))
    assert run(lockstep, lambda participant: participant.run_once("again", sum, 1)) == [3, 3, 3]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_inside_a_nested_action_leaves_no_replica_waiting(lockstep, failing):
    def function(participant):
        def inner():
            if participant.index == failing:
                raise ValueError("bad")
            return participant.run_once("inner", sum, 1)

        participant.run_once("outer", lockstep.run_nested, inner)

    for _ in range(20):
        with pytest.raises(ValueError, match="bad"):
            run(lockstep, function)
        assert run(lockstep, lambda participant: participant.run_once("again", sum, 1)) == [3, 3, 3]


@pytest.mark.parametrize("early", [0, 1, 2])
def test_replicas_that_return_early_or_run_another_action_are_named(lockstep, early):
    def leaves(participant):
        if participant.index != early:
            participant.run_once("the action", lambda payloads: None)

    def differs(participant):
        participant.run_once(f"action {participant.index == early}", lambda payloads: None)

    with pytest.raises(RuntimeError, match=rf"replica {early} has returned"):
        run(lockstep, leaves)
    with pytest.raises(RuntimeError, match=rf"replica {early} waits in action True"):
        run(lockstep, differs)


def test_an_action_outside_of_a_replicas_step_is_refused(lockstep):
    with pytest.raises(RuntimeError, match=r"the sum was requested by a replica outside of its step"):
        lockstep.participants[0].run_once("the sum", sum, 1)


def test_a_failure_after_a_nested_action_unwinds_all(lockstep):
    def function(participant):
        def inner():
            participant.run_once("inner", sum, 1)
            if participant.index == 1:
                raise ValueError("bad")

        participant.run_once("outer", lockstep.run_nested, inner)

    for _ in range(20):
        with pytest.raises(ValueError, match="bad"):
            run(lockstep, function)
        assert run(lockstep, lambda participant: participant.run_once("again", sum, 1)) == [3, 3, 3]


def test_functions_that_catch_every_exception_end_once(lockstep):
    calls = []

    def function(participant):
        calls.append(participant.index)
        if participant.index == 1:
            raise ValueError("first")
        with suppress(BaseException):  # as a bare `except`
            participant.run_once("sum", sum, 1)
        with suppress(BaseException):
            participant.run_once("sum", sum, 1)

    with pytest.raises(ValueError, match="first"):
        run(lockstep, function)
    assert sorted(calls) in ([0, 1], [0, 1, 2])
    assert run(lockstep, lambda participant: participant.run_once("again", sum, 1)) == [3, 3, 3]


def test_a_function_that_catches_the_error_of_a_late_request_fails(lockstep):
    def function(participant):
        if participant.index == 1:
            with suppress(BaseException):  # as a bare `except`
                participant.run_once("late", sum, 1)

    with pytest.raises(RuntimeError, match="replica 1 waits in late"):
        run(lockstep, function)
    assert run(lockstep, lambda participant: participant.run_once("again", sum, 1)) == [3, 3, 3]


def test_threads_start_again_after_a_failure_in_a_closed_lockstep(lockstep):
    run(lockstep, lambda participant: participant.run_once("sum", sum, 1))
    lockstep.close()
    assert not any(participant.is_running for participant in lockstep.participants)
    with pytest.raises(ZeroDivisionError):
        run(lockstep, lambda participant: 1 // participant.index)  # fails before threads start
    assert run(lockstep, lambda participant: participant.run_once("again", sum, 1)) == [3, 3, 3]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_the_exception_of_an_action_names_no_replica(lockstep):
    with pytest.raises(ZeroDivisionError) as caught:
        run(
            lockstep,
            lambda participant: participant.run_once("division", lambda payloads: 1 // 0),
        )
    assert not getattr(caught.value, "__notes__", ())


def test_requests_with_different_keys_diverge(lockstep):
    with pytest.raises(RuntimeError, match="replica 2 waits in sum, each of another object"):
        run(lockstep, lambda participant: participant.run_once("sum", sum, 1, participant.index))
