"""The cases of torch's wheel, each of which runs in new ranks, over gloo or over ``shm``.

These cases are ``DistributedTest``, torch's suite for backends, and the cases of the RPC suites that create a group.
Scripts in torch's repository start the cases, but the wheel does not contain these scripts. This module replaces them,
and forks the ranks from a server that has imported torch, so that a case takes one second instead of ten.
"""

import contextlib
import inspect
import io
import logging
import multiprocessing
import os
import re
import tempfile
import time
import unittest
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.conformance import cpu_for_gpu, substitution
from tests.conformance.outcomes import FAILED, PASSED, SKIPPED, Outcome

#: Number of ranks of ``DistributedTest``. Four is torch's default, with which no case requires more or fewer ranks.
WORLD_SIZE = 4
#: Time limit of a case, in seconds.
LIMIT_S = 150
# torch's modules read these variables at import.
os.environ.update(
    BACKEND="gloo",
    WORLD_SIZE=str(WORLD_SIZE),
    TEMP_DIR=tempfile.gettempdir(),
    INIT_METHOD="file://",  # each case has its own file
    MASTER_ADDR="127.0.0.1",
    CUDA_VISIBLE_DEVICES="",
    DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(LIMIT_S),
    PYTORCH_PRINT_REPRO_ON_FAILURE="0",
)

import torch  # noqa: E402
from torch.testing._internal import common_distributed  # noqa: E402

cpu_for_gpu.allow()

from torch.testing._internal.distributed import distributed_test  # noqa: E402
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (  # noqa: E402
    TensorPipeRpcAgentTestFixture,
)

#: Cases that run with neither backend, and the reasons.
EXCLUDED = {
    "test_ddp_uneven_inputs": "takes more than five minutes with four ranks on two cores;"
    " `data_parallel.joins_with_uneven_inputs` is a smaller case",
}
_RPC_SUITES = {
    "DdpUnderDistAutogradTest": "ddp_under_dist_autograd_test",
    "DdpComparisonTest": "ddp_under_dist_autograd_test",
    "DistAutogradTest": "rpc.dist_autograd_test",
    "RpcTest": "rpc.rpc_test",
}
_context = multiprocessing.get_context("forkserver")


class InForkedRanks(common_distributed.MultiProcessTestCase):
    """A test case that starts the ranks of a case, and kills ranks that remain after it."""

    backend = "gloo"
    log = Path(os.devnull)

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(self._rank)

    def tearDown(self) -> None:
        ranks = list(self.processes)
        super().tearDown()
        for rank in ranks:
            rank.kill()
            rank.join()
        Path(self.file_name).unlink(missing_ok=True)

    def _rank(self, target: Any, name: str, args: Any, kwargs: Any = None) -> Any:
        run = partial(target, *args, **(kwargs or {}))
        return _context.Process(target=_rank_main, name=name, args=(dict(os.environ), self.backend, self.log, run))


def _rank_main(environment: dict[str, str], backend: str, log: Path, run: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    distributed_test.INIT_METHOD = environment.get("INIT_METHOD", "env://")
    if backend == "shm":
        substitution.replace_gloo()
    run()


class DistributedTest(InForkedRanks, distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """Torch's suite for backends."""


def _suites() -> dict[str, type[InForkedRanks]]:
    """Returns the suites by name; prints the names of suites that this version of torch does not have."""
    suites: dict[str, type[InForkedRanks]] = {"DistributedTest": DistributedTest}
    for name, module in _RPC_SUITES.items():
        try:
            cases = getattr(import_module(f"torch.testing._internal.distributed.{module}"), name)
        except (ImportError, AttributeError) as error:
            print(f"torch {torch.__version__} has no suite {name}: {error}")
            continue
        bases = (cases, InForkedRanks, TensorPipeRpcAgentTestFixture)
        # Ranks look up the class by its name in this module.
        globals()[name] = suites[name] = type(name, bases, {"__module__": __name__})
    return suites


SUITES = _suites()


def names() -> list[str]:
    """Returns the names of all cases, as ``Suite.test_name``."""
    return [
        f"{suite}.{name}"
        for suite, cases in SUITES.items()
        for name in unittest.TestLoader().getTestCaseNames(cases)
        if name not in EXCLUDED and (not suite.startswith(("Rpc", "Dist")) or _makes_a_group(cases, name))
    ]


def run(name: str, backend: str) -> Outcome:
    """Runs a case in new ranks."""
    suite, _, test = name.partition(".")
    logging.getLogger(common_distributed.__name__).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        result = unittest.TestResult()
        case = SUITES[suite](test)
        case.backend, case.log = backend, Path(directory, "log")
        begin = time.monotonic()
        case.run(result)
        seconds = time.monotonic() - begin
        output = case.log.read_text(errors="replace") if case.log.exists() else ""
    if problems := [*result.failures, *result.errors]:
        trace = problems[0][1]
        return Outcome(FAILED, reason(trace), seconds, f"{trace}\n--- output of the ranks\n{output}")
    if result.skipped:
        return Outcome(SKIPPED, result.skipped[0][1].partition("\n")[0], seconds)
    return Outcome(PASSED, seconds=seconds)


def reason(trace: str) -> str:
    """Returns the error at the end of a traceback, in one line; the error of the lowest rank, if there are several."""
    of_ranks = re.split(r"^Process \d+ exited with error code .*$", trace, flags=re.MULTILINE)
    lines = [line for line in of_ranks[min(1, len(of_ranks) - 1)].splitlines() if line[:1].isalpha()]
    errors = [line for line in lines if "Error" in line.partition(":")[0] or "Exception" in line.partition(":")[0]]
    return next(iter([*errors[-1:], *lines[-1:]]), "no message")[:300]


def _makes_a_group(cases: type, name: str) -> bool:
    """Returns whether a case of an RPC suite creates a process group."""
    if cases is DistributedTest:
        return True
    source = inspect.getsource(inspect.unwrap(getattr(cases, name)))
    return "initialize_pg" in source or "init_process_group" in source
