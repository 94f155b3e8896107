"""The strategies accept all calls that the reference pages of Lightning's classes document, with the same meaning.

The pages describe ``DDPSpawnPlugin`` (Lightning 1.5), ``ParallelStrategy`` and ``HorovodStrategy`` (1.7),
``DDPStrategy`` and Fabric's ``DataParallelStrategy`` (2.x).
"""

import inspect
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

import lightning_strategies_ext as ext
from lightning_strategies_ext import fabric

PAGES: dict[str, tuple[type, dict[str, str], list[str]]] = {
    "ParallelStrategy": (
        ext.ParallelStrategy,
        {
            "__init__": "accelerator=None, parallel_devices=None, cluster_environment=None, checkpoint_io=None,"
            " precision_plugin=None",
            "all_gather": "tensor, group=None, sync_grads=False",
            "block_backward_sync": "",
            "reconciliate_processes": "trace",
            "reduce_boolean_decision": "decision",
            "teardown": "",
        },
        ["is_global_zero", "root_device"],
    ),
    "DDPStrategy": (
        ext.DDPStrategy,
        {
            "__init__": "accelerator=None, parallel_devices=None, cluster_environment=None, checkpoint_io=None,"
            " precision_plugin=None, ddp_comm_state=None, ddp_comm_hook=None, ddp_comm_wrapper=None,"
            " model_averaging_period=None, process_group_backend=None, timeout=timedelta(seconds=1800),"
            " start_method='popen', **kwargs",
            "barrier": "*args, **kwargs",
            "broadcast": "obj, src=0",
            "on_exception": "exception",
            "optimizer_step": "optimizer, closure, model=None, **kwargs",
            "reduce": "tensor, group=None, reduce_op='mean'",
            "setup": "trainer",
            "setup_environment": "",
            "teardown": "",
        },
        ["is_distributed", "root_device"],
    ),
    "HorovodStrategy": (
        ext.HorovodStrategy,
        {
            "__init__": "accelerator=None, parallel_devices=None, checkpoint_io=None, precision_plugin=None",
            "all_gather": "result, group=None, sync_grads=False",
            "barrier": "*args, **kwargs",
            "broadcast": "obj, src=0",
            "model_to_device": "",
            "post_backward": "closure_loss",
            "reduce": "tensor, group=None, reduce_op='mean'",
            "setup": "trainer",
            "teardown": "",
        },
        ["handles_gradient_accumulation", "root_device"],
    ),
    "DDPSpawnPlugin": (
        ext.DDPSpawnPlugin,
        {
            "__init__": "parallel_devices=None, num_nodes=None, cluster_environment=None, checkpoint_io=None,"
            " sync_batchnorm=None, ddp_comm_state=None, ddp_comm_hook=None, ddp_comm_wrapper=None, **kwargs",
            "add_to_queue": "trainer, queue",
            "barrier": "*args, **kwargs",
            "broadcast": "obj, src=0",
            "get_from_queue": "trainer, queue",
            "model_to_device": "",
            "post_dispatch": "trainer",
            "pre_backward": "closure_loss",
            "reduce": "tensor, group=None, reduce_op='mean'",
            "setup": "",
            "spawn": "function, *args, return_result=True, **kwargs",
            "teardown": "",
        },
        ["root_device"],
    ),
    "Fabric's DataParallelStrategy": (
        fabric.DataParallelStrategy,
        {
            "__init__": "accelerator=None, parallel_devices=None, checkpoint_io=None, precision=None",
            "all_reduce": "collection, group=None, reduce_op='mean'",
            "barrier": "*args, **kwargs",
            "batch_to_device": "batch, device=None",
            "broadcast": "obj, src=0",
            "get_module_state_dict": "module",
            "load_module_state_dict": "module, state_dict, strict=True",
            "module_to_device": "module",
            "reduce_boolean_decision": "decision, all=True",
            "setup_module": "module",
        },
        ["distributed_sampler_kwargs", "root_device"],
    ),
}

METHODS = [
    pytest.param(strategy, name, signature, id=f"{page}.{name}")
    for page, (strategy, methods, _) in PAGES.items()
    for name, signature in methods.items()
]


def calls_of(documented: inspect.Signature) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yields calls of a function: required arguments only, all by position, all by keyword, with other ``kwargs``."""
    parameters = [p for p in documented.parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    names = [p.name for p in parameters]
    kinds = {p.kind for p in documented.parameters.values()}
    by_keyword = {p.name: p.name for p in documented.parameters.values() if p.kind == p.KEYWORD_ONLY}
    more = {"name": "more", "something_else": 1} if inspect.Parameter.VAR_KEYWORD in kinds else {}
    yield [p.name for p in parameters if p.default is p.empty], {}
    yield names, by_keyword
    yield [], {**dict.fromkeys(names), **by_keyword}
    yield names, {**by_keyword, **more}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        yield [*names, "one", "two"], {**by_keyword, **more}


@pytest.mark.parametrize(("strategy", "name", "text"), METHODS)
def test_a_documented_call_is_accepted_and_means_the_same(strategy: type, name: str, text: str) -> None:
    namespace: dict[str, Any] = {"timedelta": timedelta}
    exec(f"def documented(self, {text}): ...", namespace)
    documented, accepted = inspect.signature(namespace["documented"]), inspect.signature(getattr(strategy, name))
    parameters = {key: p for key, p in documented.parameters.items() if p.kind == p.POSITIONAL_OR_KEYWORD}
    for args, kwargs in calls_of(documented.replace(parameters=list(documented.parameters.values())[1:])):
        bound, expected = accepted.bind(None, *args, **kwargs), documented.bind(None, *args, **kwargs)
        assert {key: bound.arguments.get(key) for key in parameters} == {
            key: expected.arguments.get(key) for key in parameters
        }
    for key, parameter in parameters.items():
        assert accepted.parameters[key].default == parameter.default, key


@pytest.mark.parametrize(("strategy", "properties"), [(page[0], page[2]) for page in PAGES.values()], ids=PAGES.keys())
def test_documented_properties_are_properties(strategy: type, properties: list[str]) -> None:
    for name in properties:
        assert isinstance(inspect.getattr_static(strategy, name), property), name


@pytest.mark.parametrize(
    "make_strategy",
    [
        ext.DDPStrategy,
        ext.DDPSpawnPlugin,
        ext.DataParallelStrategy,
        ext.HorovodStrategy,
        fabric.DDPStrategy,
        fabric.DataParallelStrategy,
        fabric.HorovodStrategy,
    ],
)
def test_barrier_accepts_any_arguments(make_strategy: type) -> None:
    strategy = make_strategy(parallel_devices=[torch.device("cpu")])
    for args, kwargs in (
        ((), {}),
        (("a name",), {}),
        ((), {"name": "a name"}),
        (("a", 2), {"timeout": 3, "name": "b"}),
    ):
        strategy.barrier(*args, **kwargs)
