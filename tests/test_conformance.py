"""Runs a part of torch's tests and of this package's programs over ``shm``. ``make conformance`` runs all cases."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_script

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

#: Quick cases of torch: all collectives, subgroups, asynchronous operations, objects, and DDP with each option.
TORCH_CASES = [
    "test_all_gather_coalesced_simple",
    "test_all_gather_group",
    "test_all_gather_object_subgroup",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_group_max",
    "test_all_reduce_sum",
    "test_all_reduce_sum_async",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast_group",
    "test_ddp_buffer_hook_allreduce_return_future",
    "test_ddp_comm_hook_logging",
    "test_ddp_control_flow_different_across_ranks",
    "test_ddp_create_graph",
    "test_ddp_forward_backward_hook",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_hook_parity_allreduce",
    "test_ddp_join_model_equivalence",
    "test_ddp_logging_data_cpu",
    "test_ddp_static_graph_nested_types",
    "test_destroy_group",
    "test_gather_group",
    "test_gather_object_subgroup",
    "test_new_subgroups_with_group_param",
    "test_post_localSGD_optimizer_parity",
    "test_reduce_group_sum",
    "test_reduce_sum",
    "test_scatter_group",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
]
PROGRAMS = [
    "functional.every_collective",
    "functional.coalesced",
    "functional.gradients",
    "dtensors.redistributed",
    "dtensors.all_reduce_of_a_dtensor_is_refused_alike",
    "fully_sharded.trains",
    "fully_sharded.trains_in_bf16",
    "data_parallel.hooks",
    "data_parallel.joins_with_uneven_inputs",
    "data_parallel.joins_with_gradients_divided_by_contributing_ranks",
    "data_parallel.pipeline",
    "optimizers.zero",
    "optimizers.zero_and_ddp_join",
    "checkpoints.saved_in_the_background",
    "groups.meshes",
    "groups.methods_of_the_group",
    "groups.objects",
    "groups.many_at_once_with_futures",
]
NAMES = [*(f"DistributedTest.{name}" for name in TORCH_CASES), *PROGRAMS]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Provides the outcomes of all cases; torch's cases run over ``shm``, and failed cases also over gloo."""
    module = "torch.testing._internal.distributed.distributed_test"
    if find_spec(module) is None:
        pytest.skip(f"this torch has no {module}")
    path: Path = tmp_path_factory.mktemp("conformance") / "outcomes.json"
    command = run_script("-m", "tests.conformance", "--without-gloo", "--json", path, *NAMES, timeout_s=800)
    assert path.exists(), command.stdout
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_passes_over_shm(name: str, outcomes: dict[str, Any]) -> None:
    if name not in outcomes:
        pytest.skip(f"this torch has no {name}")
    gloo, outcome = (outcomes[name][backend] for backend in ("gloo", "shm"))
    if outcome["kind"] == "skipped":
        pytest.skip(outcome["why"])
    if gloo["kind"] != "passed":
        pytest.skip(f"with this version of torch, the case fails over gloo: {gloo['why']}")
    assert outcome["kind"] == "passed", f"{outcome['why']}\n{outcome['details']}"
