"""The cases that gloo passes and ``shm`` does not, each with the reason. ``make conformance`` holds it to be complete
and up to date: a case that is missing here and fails, and one that is here and passes, are errors."""

EXCEPTIONS: dict[str, str] = {
    "DistributedTest.test_get_backend": 'compares `dist.get_backend()` with the name "gloo"; here it is "shm"',
    "DistributedTest.test_monitored_barrier_gloo": 'torch asks for the name "gloo" before it asks the group',
    "DistributedTest.test_monitored_barrier_gloo_subgroup": 'torch asks for the name "gloo" before it asks the group',
}
