"""The cases that gloo passes and ``shm`` does not, each with the reason.

``make conformance`` holds the list to be complete and up to date: a case that fails and is missing here is an error,
and so is one that is here and passes.
"""

_MONITORED_BARRIER = 'torch refuses `monitored_barrier` unless the backend is called "gloo", before it asks the group'

EXCEPTIONS: dict[str, str] = {
    "DistributedTest.test_get_backend": 'compares the name of the backend with "gloo"; here it is "shm"',
    "DistributedTest.test_monitored_barrier_failure_order": _MONITORED_BARRIER,
    "DistributedTest.test_monitored_barrier_gloo": _MONITORED_BARRIER,
    "DistributedTest.test_monitored_barrier_gloo_subgroup": _MONITORED_BARRIER,
    "DistributedTest.test_monitored_barrier_wait_all_ranks": _MONITORED_BARRIER,
    "DistributedTest.test_ddp_profiling_torch_profiler": "wants each all-reduce to begin and end on different"
    " threads, by the profiler's events; over `shm` the thread that starts one often ends it",
}
