"""Parameters that are frozen or unfrozen during training, as in transfer learning: ranks keep equal models.

torch's DDP, and thus Lightning's ``ddp``, silently omits gradients of parameters that are unfrozen later.
"""

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import BackboneFinetuning, Callback
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

from lightning_strategies_ext import CommunicationMonitor, DDPStrategy, ModelMismatchError
from lightning_strategies_ext.collectives import LocalCollectives
from lightning_strategies_ext.torch_distributed import bucket_search
from lightning_strategies_ext.torch_distributed.compression.config import DiLoCo, LocalSGD, TopK
from lightning_strategies_ext.torch_distributed.feature import FeatureContext
from lightning_strategies_ext.torch_distributed.gradient_sync import GradientSyncOptions
from lightning_strategies_ext.torch_distributed.unfreezing import Unfreezing
from lightning_strategies_ext.torch_distributed.wrapping import rewrap_in_ddp
from tests.support.models import MLP, NUM_CLASSES, NUM_FEATURES, assert_same_bits, dataset, make_trainer, state_of
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

BATCH_SIZE = 8
NUM_BATCHES = 8
State = dict[str, Tensor]


class Net(MLP):
    """A model with a backbone with buffers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = self.net[0], self.net[2]

    def make_net(self) -> nn.Module:
        backbone = nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.Tanh(), nn.Linear(16, 16))
        return nn.Sequential(backbone, nn.Tanh(), nn.Linear(16, NUM_CLASSES))

    def train_dataloader(self):
        ranks = self.trainer.world_size, self.trainer.global_rank
        sampler = DistributedSampler(dataset(), *ranks, shuffle=False) if ranks[0] > 1 else None
        return DataLoader(dataset(), BATCH_SIZE // ranks[0], sampler=sampler)

    def val_dataloader(self):
        return DataLoader(dataset(), BATCH_SIZE)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class HeadOnly(Net):
    """A model whose backbone is trained with an optimizer group that is added when it is unfrozen."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


class Needs(Callback):
    """A callback that unfreezes the backbone in some batches, counted over epochs, and freezes it in other batches."""

    def __init__(self, needs: Callable[[int], bool]) -> None:
        self.needs = needs

    def setup(self, trainer, pl_module, stage):
        pl_module.backbone.requires_grad_(self.needs(0))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        needs = self.needs(trainer.current_epoch * NUM_BATCHES + batch_idx)
        pl_module.backbone.requires_grad_(needs)
        if not needs:
            for parameter in pl_module.backbone.parameters():
                parameter.grad = None

    def on_train_end(self, trainer, pl_module):
        self.num_bytes = getattr(trainer.strategy, "num_bytes_exchanged", None)


def unfreeze() -> Callback:
    return Needs(lambda number: number >= 5)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], type[Net], Callable[[], Callback]]] = {
    "unfrozen": ({}, {}, Net, unfreeze),
    "unfrozen in a window of accumulation": ({}, {"accumulate_grad_batches": 4}, Net, unfreeze),
    "unfrozen with unused parameters": ({"find_unused_parameters": True}, {}, Net, unfreeze),
    "unfrozen with a static graph": ({"static_graph": True}, {}, Net, unfreeze),
    "unfrozen with gradients kept twice": ({"gradient_as_bucket_view": False}, {}, Net, unfreeze),
    "unfrozen over gloo": ({"process_group_backend": "gloo"}, {}, Net, unfreeze),
    "unfrozen with a hook": ({"ddp_comm_hook": lambda state, bucket: average(bucket)}, {}, Net, unfreeze),
    "unfrozen and joined": ({"uneven_inputs": "join"}, {}, Net, unfreeze),
    "unfrozen with buckets by trial": ({"bucket_cap_mb": "auto"}, {}, Net, unfreeze),
    "unfrozen by hand": ({}, {}, Manual, unfreeze),
    "frozen": ({}, {}, Net, lambda: Needs(lambda number: number < 5)),
    "frozen with unused parameters": (
        {"find_unused_parameters": True},
        {},
        Net,
        lambda: Needs(lambda number: number < 5),
    ),
    "in turns": ({}, {}, Net, lambda: Needs(lambda number: number % 3 > 0)),
    "Lightning's callback": ({}, {}, HeadOnly, lambda: BackboneFinetuning(1, backbone_initial_lr=0.1)),
}
COMPRESSED: dict[str, dict[str, Any]] = {
    "bf16": {"compression": "bf16"},
    "PowerSGD": {"compression": "powersgd"},
    "top-k": {"compression": TopK(fraction=0.5, warmup_steps=1)},
    "local SGD": {"compression": LocalSGD(period=3, warmup_steps=2)},
    "DiLoCo": {"compression": DiLoCo(period=3, warmup_steps=2)},
    "post-local SGD": {
        "ddp_comm_state": PostLocalSGDState(None, None, 3, post_local_gradient_allreduce=False),
        "ddp_comm_hook": post_localSGD_hook,
        "model_averaging_period": 3,
    },
    "DiLoCo as local SGD": {"compression": DiLoCo(period=3, warmup_steps=2, learning_rate=1.0, momentum=0.0)},
}


#: Numbers of elements of each bucket that the hook below has averaged.
averaged: list[int] = []


def average(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    averaged.append(bucket.buffer().numel())
    future = dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
    return future.then(lambda summed: summed.value()[0])


def train(case: str, strategy: Any, devices: int) -> State:
    _, options, kind, callback = CASES[case]
    pl.seed_everything(11, verbose=False)
    model = kind()
    options = {"use_distributed_sampler": False, "val_check_interval": 4, **options}
    make_trainer(strategy, devices, callbacks=[callback()], **options).fit(model)
    return state_of(model)


def train_all() -> tuple[dict[str, State], list[int]]:
    bucket_search.SIZES_MB = (2**-11,)  # type: ignore[misc]
    found = {case: train(case, DDPStrategy(**arguments), 2) for case, (arguments, *_) in CASES.items()}
    return found, averaged


def test_weights_are_those_of_one_process_on_all_ranks():
    (first, first_averaged), (second, second_averaged) = run_ranks(train_all)
    head, both = (sum(each.numel() for each in part.parameters()) for part in (Net().head, Net()))
    assert first_averaged == second_averaged == [head] * 5 + [both] * (2 * NUM_BATCHES - 5)
    for case in CASES:
        assert_same_bits(first[case], second[case])
        for name, value in train(case, "auto", 1).items():
            torch.testing.assert_close(first[case][name], value, msg=lambda text, case=case: f"{case}: {text}")


#: Batches in which the backbone is trained.
TIMES: dict[str, Callable[[int], bool]] = {
    "for a while": lambda number: 4 <= number < 12 or number > 14,
    "not at the end": lambda number: number < 12,
}


def train_compressed() -> dict[tuple[str, str], tuple[State, State, int | None]]:
    found = {}
    for name, arguments in COMPRESSED.items():
        for when, needs in TIMES.items():
            pl.seed_everything(11, verbose=False)
            model = Net()
            begin = state_of(model)
            callback = Needs(needs)
            make_trainer(DDPStrategy(**arguments), 2, callbacks=[callback], use_distributed_sampler=False).fit(model)
            found[name, when] = begin, state_of(model), callback.num_bytes
    return found


def test_exchanges_other_than_of_gradients_follow():
    first, second = run_ranks(train_compressed)
    for case, (begin, end, _) in first.items():
        assert_same_bits(end, second[case][1])
        assert all(not torch.equal(begin[each], end[each]) for each in begin), case
    for when in TIMES:
        local_sgd, as_local_sgd = first["local SGD", when][1], first["DiLoCo as local SGD", when][1]
        for name, value in local_sgd.items():
            torch.testing.assert_close(as_local_sgd[name], value)
    head, backbone = (sum(each.numel() for each in part.parameters()) for part in (Net().head, Net().backbone))
    assert first["bf16", "for a while"][2] == 2 * (2 * NUM_BATCHES * head + (8 + 1) * backbone)


def train_observed() -> tuple[list[float], list[float]]:
    found = []
    for last in (5, 8):
        monitor = CommunicationMonitor(every_n_steps=16, observed_steps=2, plot=False)
        callbacks = [monitor, Needs(lambda number, last=last: number >= last)]
        make_trainer("ddp_ext", callbacks=callbacks, use_distributed_sampler=False).fit(Net())
        found.append([times.num_bytes for times in monitor.rank_times])
    return found[0], found[1]


def test_a_monitor_counts_what_is_exchanged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    head, backbone = (sum(each.nbytes for each in part.parameters()) for part in (Net().head, Net().backbone))
    for later, last in zip(run_ranks(train_observed)[0], (5, 8), strict=True):
        assert later == [head + backbone * (16 - last) / 16] * 2


class AlternatesLayers(Net):
    """A model that alternates between two losses: the second loss freezes the head; a hook unfreezes a layer later."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.more.requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        if self.global_step == 6:
            self.more.requires_grad_()

    def training_step(self, batch, batch_idx):
        is_turn = batch_idx % 2 == 0
        self.head.requires_grad_(is_turn)
        features = self.net(batch[0])
        return functional.cross_entropy(features + self.more(batch[0]) if is_turn else features, batch[1])


class UnfreezesInStep(Net):
    def training_step(self, batch, batch_idx):
        self.backbone.requires_grad_(batch_idx == 3)
        return super().training_step(batch, batch_idx)


def train_with_unfreezing_in_the_step() -> tuple[State, str]:
    pl.seed_everything(11, verbose=False)
    model = AlternatesLayers()
    make_trainer("ddp_ext_find_unused_parameters_true", use_distributed_sampler=False).fit(model)
    other = UnfreezesInStep()
    other.backbone.requires_grad_(False)
    with pytest.raises(RuntimeError, match="was unfrozen within the training step") as caught:
        make_trainer("ddp_ext", use_distributed_sampler=False).fit(other)
    return state_of(model), str(caught.value)


def test_parameters_unfrozen_in_a_step_are_an_error_unless_exchanged_before():
    (first, message), (second, other_message) = run_ranks(train_with_unfreezing_in_the_step)
    assert_same_bits(first, second)
    assert message == other_message
    assert message.startswith("The parameter `net.0.0.weight` was unfrozen within the training step")
    pl.seed_everything(11, verbose=False)
    alone = AlternatesLayers()
    make_trainer("auto", 1, use_distributed_sampler=False).fit(alone)
    for name, value in state_of(alone).items():
        torch.testing.assert_close(first[name], value)


class UnfreezeOther(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            pl_module.backbone[2 * trainer.global_rank].requires_grad_()


def train_differently() -> str:
    model = Net()
    model.backbone.requires_grad_(False)
    trainer = make_trainer(DDPStrategy(), callbacks=[UnfreezeOther()], use_distributed_sampler=False)
    with pytest.raises(ModelMismatchError) as caught:
        trainer.fit(model)
    return str(caught.value)


def test_ranks_that_unfreeze_different_parameters_get_an_error():
    for message in run_ranks(train_differently):
        assert "rank 0 has the parameter `net.0.0.weight`" in message
        assert "rank 1 has the parameter `net.0.0.weight` (float32, shape (16, 8), without gradient)" in message


def train_with_fabric(strategy: str, devices: int) -> State:
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=devices)
    fabric.launch()
    fabric.seed_everything(11, verbose=False)
    net = Net().net
    net[0].requires_grad_(False)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    batches = fabric.setup_dataloaders(DataLoader(dataset(), BATCH_SIZE // devices))
    for number, (features, labels) in enumerate(batches):
        if number == 3:
            net[0].requires_grad_()
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            fabric.backward(functional.cross_entropy(model(features), labels))
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return state_of(net)


def test_unfreezing_under_fabric_trains_as_one_process():
    first, second = run_ranks(train_with_fabric, "ddp_ext", 2)
    assert_same_bits(first, second)
    for name, value in train_with_fabric("auto", 1).items():
        torch.testing.assert_close(first[name], value)


@pytest.mark.forked
def test_workers_return_which_parameters_require_gradients():
    model = HeadOnly()
    callback = BackboneFinetuning(1, backbone_initial_lr=0.1)
    pl.seed_everything(11, verbose=False)
    trainer = make_trainer("ddp_spawn_ext", callbacks=[callback], use_distributed_sampler=False)
    trainer.fit(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert [len(group["params"]) for group in trainer.optimizers[0].param_groups] == [2, 4]


def in_ddp(**arguments: Any) -> nn.parallel.DistributedDataParallel:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(nn.Linear(2, 2), **arguments)


@pytest.mark.forked
def test_a_rebuild_of_ddp_keeps_its_state_and_hooks():
    model, inputs = in_ddp(), []
    model.register_forward_pre_hook(lambda model, args: inputs.append(args))
    with model.no_sync():
        rewrap_in_ddp(model.eval(), torch.device("cpu"), bucket_cap_mb=3)
        assert (model.training, model.require_backward_grad_sync) == (False, False)
    assert model.require_backward_grad_sync
    assert model.bucket_bytes_cap == 3 * 2**20
    model(torch.ones(1, 2))
    assert len(inputs) == 1


@pytest.mark.forked
def test_the_replaced_ddp_wrapper_exchanges_no_gradients():
    model = in_ddp(gradient_as_bucket_view=True)
    model(torch.ones(1, 2))  # DDP now waits for the gradients of this forward pass
    held = model.reducer
    rewrap_in_ddp(model, torch.device("cpu"))
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    assert model.module.weight.grad.tolist() == [[2.0, 2.0]] * 2
    del held


@pytest.mark.forked
@pytest.mark.parametrize(
    ("arguments", "expected"), [({}, [1, 2]), ({"find_unused_parameters": True}, [])], ids=["plain", "with unused ones"]
)
def test_a_rebuild_of_ddp_happens_only_where_required(arguments, expected):
    model, numbers = in_ddp(**arguments), []
    context = FeatureContext(GradientSyncOptions(), {}, torch.device("cpu"), LocalCollectives(0, 1))
    context.rebuild = lambda model: numbers.append(sum(each.requires_grad for each in model.parameters()))
    unfreezing = Unfreezing(context)
    unfreezing.wrap(model)
    model.requires_grad_(False)
    model(torch.ones(1, 2))  # like a discriminator during the training of the generator
    model.module.weight.requires_grad_()
    with torch.no_grad():
        model(torch.ones(1, 2))
    copy.deepcopy(unfreezing)
    assert numbers == []
    model(torch.ones(1, 2))
    assert numbers == expected[:1]
    model.requires_grad_()
    model(torch.ones(1, 2))
    assert numbers == expected
    model(torch.ones(1, 2))
    assert numbers == expected


@pytest.mark.forked
def test_options_that_ddp_can_apply_only_once_are_refused():
    model = in_ddp()
    begin = "The parameters of Linear that require gradients have changed since DDP wrapped it"
    with pytest.raises(ValueError, match=f"{begin}.*`mixed_precision='anything'`. Omit that argument"):
        rewrap_in_ddp(model, torch.device("cpu"), mixed_precision="anything")
