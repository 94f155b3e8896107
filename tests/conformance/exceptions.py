"""Cases that pass over gloo but not over ``shm``, each with the reason.

``make conformance`` verifies that the list is complete and up to date: a failed case that is not in the list is an
error, and so is a case of the list that passes.
"""

_MONITORED_BARRIER = 'torch refuses `monitored_barrier` unless the backend is called "gloo", before it calls the group'

EXCEPTIONS: dict[str, str] = {
    "DistributedTest.test_get_backend": 'compares the name of the backend with "gloo"; here it is "shm"',
    "DistributedTest.test_monitored_barrier_failure_order": _MONITORED_BARRIER,
    "DistributedTest.test_monitored_barrier_gloo": _MONITORED_BARRIER,
    "DistributedTest.test_monitored_barrier_gloo_subgroup": _MONITORED_BARRIER,
    "DistributedTest.test_monitored_barrier_wait_all_ranks": _MONITORED_BARRIER,
    "DistributedTest.test_ddp_profiling_torch_profiler": "requires that each all-reduce begins and ends on different"
    " threads in the profiler's events; over `shm`, the thread that starts an all-reduce often ends it",
}
