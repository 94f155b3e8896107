"""Subgroups, device meshes, objects, coalesced and uneven collectives, point to point, sharded tensors."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.conformance.programs import needed, program
from tests.conformance.programs.functional import ramp


@program(world_size=4)
def meshes() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    results: list[Any] = []
    for name in ("rows", "columns"):
        group = mesh.get_group(name)
        tensor = torch.randn(5)
        dist.all_reduce(tensor, group=group)
        results += [tensor, dist.get_process_group_ranks(group), mesh.get_local_rank(name), mesh[name].size()]
    return [*results, mesh.get_coordinate()]


@program(world_size=4)
def flattened_meshes() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    if not hasattr(mesh, "_flatten"):
        needed("torch.distributed.device_mesh:DeviceMesh._flatten")
    flat = mesh._flatten("all")
    tensor = ramp(7)
    dist.all_reduce(tensor, group=flat.get_group())
    return [tensor, flat.size(), dist.get_process_group_ranks(flat.get_group())]


@program(world_size=4)
def new_subgroups() -> Any:
    results: list[Any] = []
    for group, all_groups in (
        dist.new_subgroups(group_size=2),
        dist.new_subgroups_by_enumeration([[0, 3], [1, 2]]),
    ):
        tensor = torch.randn(5)
        dist.all_reduce(tensor, group=group)
        results += [tensor, dist.get_rank(group), dist.get_process_group_ranks(group), len(all_groups)]
    return results


@program(world_size=4)
def overlapping_subgroups_at_once() -> Any:
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [2, 3], [0, 3])]
    tensors = [torch.randn(3000) for _ in groups]
    members = [group is not dist.GroupMember.NON_GROUP_MEMBER for group in groups]
    works = [
        dist.all_reduce(tensor, group=group, async_op=True)
        for tensor, group, is_member in zip(tensors, groups, members, strict=True)
        if is_member
    ]
    for work in works:
        work.wait()
    return tensors


@program(world_size=4)
def split_groups() -> Any:
    split = needed("torch.distributed:split_group")
    try:
        return split(split_ranks=[[0, 1], [2, 3]]) is not None
    except (RuntimeError, ValueError) as error:
        return type(error).__name__


@program()
def local_synchronization() -> Any:
    group = dist.new_group([0, 1], use_local_synchronization=True, group_desc="two")
    tensor = torch.randn(5)
    dist.broadcast(tensor, 1, group=group)
    return [tensor, group.size(), dist.get_group_rank(group, 1), dist.get_global_rank(group, 0)]


@program(world_size=3)
def objects() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    own = {"rank": rank, "text": "x" * (1 + 5000 * rank), "tensor": torch.arange(rank)}
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, own)
    at_root: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(own, at_root, dst=1)
    spread = [own, None]
    dist.broadcast_object_list(spread, src=2)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, gathered if rank == 0 else None, src=0)
    return [gathered, at_root, spread, scattered]


@program()
def objects_from_one_to_another() -> Any:
    send, receive = (needed(f"torch.distributed:{name}") for name in ("send_object_list", "recv_object_list"))
    objects: list[Any] = [{"a": 1}, "text", torch.arange(3)]
    if dist.get_rank() == 0:
        send(objects, dst=1)
    else:
        objects = [None] * 3
        receive(objects, src=0)
    return objects


@program(world_size=3)
def whole_numbers_of_three_ranks() -> Any:
    results = []
    for dtype in (torch.int8, torch.uint8, torch.int32, torch.int64):
        for op in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
            for count in (1, 7, 5000):
                tensor = ramp(count, dtype=dtype)
                dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
                results.append(tensor)
    return results


@program(world_size=3)
def uneven_parts() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty(sum(other + 1 for other in range(size)), 2)
    sent = torch.cat([ramp(other + 1, 2) for other in [rank] * size])
    dist.all_to_all_single(received, sent, [other + 1 for other in range(size)], [rank + 1] * size)
    return received


@program()
def sparse() -> Any:
    rank = dist.get_rank()
    tensor = torch.sparse_coo_tensor(torch.tensor([[rank, 2]]), torch.tensor([1.0, 2.0]), (4,))
    dist.all_reduce(tensor)
    return tensor.coalesce().to_dense()


@program()
def coalesced() -> Any:
    manager = needed("torch.distributed.distributed_c10d:_coalescing_manager")
    tensors = [torch.randn(5), torch.randn(2, 3)]
    parts = [torch.empty(2), torch.empty(3)]
    try:
        with manager(device=torch.device("cpu")):
            for tensor in tensors:
                dist.all_reduce(tensor)
        with manager(device=torch.device("cpu"), async_ops=True) as works:
            for part, whole in zip(parts, (torch.randn(4), torch.randn(6)), strict=True):
                dist.reduce_scatter_tensor(part, whole)
        works.wait()
    except (RuntimeError, NotImplementedError) as error:
        return type(error).__name__
    return [tensors, parts]


@program()
def in_batches_from_one_to_another() -> Any:
    rank = dist.get_rank()
    received = [torch.empty(5), torch.empty(3, dtype=torch.int64)]
    sent = [torch.randn(5), ramp(3, dtype=torch.int64)]
    operations = [dist.P2POp(dist.isend, tensor, 1 - rank) for tensor in sent]
    operations += [dist.P2POp(dist.irecv, tensor, 1 - rank) for tensor in received]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


@program()
def many_at_once_with_futures() -> Any:
    tensors = [torch.randn(2000) for _ in range(20)]
    futures = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors]
    doubled = [future.then(lambda ended: ended.value()[0] * 2) for future in futures]
    return [torch.futures.wait_all(doubled), tensors]


@program()
def complex_bool_and_empty() -> Any:
    results: list[Tensor] = []
    for tensor in (
        torch.randn(4, dtype=torch.complex64),
        torch.tensor([True, False]),
        torch.empty(0, 3),
        torch.tensor(2.0),
    ):
        outputs = [torch.empty_like(tensor) for _ in range(2)]
        dist.all_gather(outputs, tensor)
        dist.broadcast(tensor, 1)
        results += [*outputs, tensor]
    return results


@program()
def sharded_tensors() -> Any:
    sharded, spec_of = (
        needed(f"torch.distributed._shard.{name}")
        for name in ("sharded_tensor:rand", "sharding_spec:ChunkShardingSpec")
    )
    spec = spec_of(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
    tensor = sharded(spec, 5, 4)
    whole = torch.empty(5, 4) if dist.get_rank() == 0 else None
    tensor.gather(0, whole)
    return whole


@program()
def methods_of_the_group() -> Any:
    """Calls the short forms of collectives, some of which torch's DDP uses."""
    group = dist.group.WORLD
    tensors = [torch.randn(5) for _ in range(8)]
    outputs = [torch.empty(5) for _ in range(4)]
    rank = dist.get_rank()
    works = [
        group.allreduce(tensors[0]),
        group.allreduce([tensors[1]], dist.ReduceOp.MAX),
        group.broadcast(tensors[2], 1),
        group.allgather(outputs[:2], tensors[3]),
        group.gather(outputs[2:], tensors[4], 0) if rank == 0 else group.gather([], tensors[4], 0),
        group.scatter(tensors[5], [torch.randn(5), torch.randn(5)] if rank == 1 else [], 1),
        group.reduce_scatter(tensors[6], [torch.randn(5), torch.randn(5)]),
        group.barrier(),
    ]
    for work in works:
        work.wait()
    return [tensors, outputs[: 2 + 2 * (rank == 0)]]
