"""Requests to a store fail soon after its host has become unreachable."""

import time
from pathlib import Path

import pytest

from tests.support.namespace_hosts import NoHostsError, two_hosts

pytestmark = pytest.mark.processes

SERVE = """
import sys
import time
from pathlib import Path

import torch.distributed as dist

store = dist.TCPStore(sys.argv[1], 29500, is_master=True, wait_for_workers=False)
Path(sys.argv[2], "serves").touch()
time.sleep(1000)
"""

ASK = """
import sys
from pathlib import Path

import torch.distributed as dist

from lightning_strategies_ext._system.connections import enable_store_keepalive

store = dist.TCPStore(sys.argv[1], 29500)
enable_store_keepalive(dist.PrefixStore("part", store))
Path(sys.argv[2], "asks").touch()
store.get("a key that is never set")
"""
#: Time limit in seconds; without keepalives, the store's timeout of minutes would apply.
LIMIT_S = 60.0


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def test_a_rank_does_not_wait_for_a_store_whose_host_is_lost(tmp_path):
    log = tmp_path / "log"
    try:
        with two_hosts(tmp_path) as (first, second):
            first.start("-c", SERVE, first.address, tmp_path, log=tmp_path / "log of the store")
            wait_for(tmp_path / "serves")
            rank = second.start("-c", ASK, first.address, tmp_path, log=log)
            wait_for(tmp_path / "asks")
            first.set_cable("down")
            assert rank.wait(LIMIT_S) == 1
    except NoHostsError as error:
        pytest.skip(str(error))
    assert "DistNetworkError" in log.read_text() or "timed out" in log.read_text()
