"""The smoke test of the installed Horovod."""

import os
import sys

import pytest

from lightning_strategies_ext.horovod_build.smoke_test import SmokeTestError, SmokeTestLauncher, run_smoke_test


@pytest.mark.processes
@pytest.mark.parametrize(
    ("launcher", "expected_text"),
    [
        ([sys.executable, "-c", "print('no route'); raise SystemExit(3)"], "exited with exit code 3.*no route"),
        ([sys.executable, "-c", "print('rank 0 of 2: the sum is 3')"], "exited with exit code 0"),
        ([sys.executable, "-c", "import time; print('hung', flush=True); time.sleep(60)"], "took more than 1 s.*hung"),
        (["/no/such/launcher"], "could not be started"),
    ],
)
def test_a_failed_smoke_test_reports_its_error(launcher: list[str], expected_text: str):
    with pytest.raises(SmokeTestError, match=f"(?s){expected_text}"):
        run_smoke_test(SmokeTestLauncher("the launcher", launcher, {}), dict(os.environ), timeout_s=1)
