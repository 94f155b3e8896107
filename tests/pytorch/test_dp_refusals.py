"""Errors of ``dp_ext``: their messages and times; and the state after the failure of a replica."""

import signal
import sys
import textwrap
import threading
import time

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_strategies_ext import DataParallelStrategy
from tests.support.dp_training import each_mode, train
from tests.support.models import MLP, ManualMLP, WithBatchNorm, assert_close, dataset, loader, make_trainer, state_of
from tests.support.ranks import kill_tree, start_script

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*log_every_n_steps")

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"parallel_devices": []}, ValueError, r"`parallel_devices=\[\]` contains no device"),
        ({"parallel_devices": "cpu"}, TypeError, "`parallel_devices` must be a list of torch.device, got 'cpu'"),
        ({"parallel_devices": [CPU, torch.device("cuda", 0)]}, ValueError, "contains cpu and cuda"),
        ({"parallel_devices": [torch.device("cuda", 0)] * 2}, ValueError, "contains a GPU twice"),
        ({"parallel_devices": [torch.device("mps", 0), torch.device("mps", 1)]}, ValueError, "Use `devices=1`"),
        ({"scatter": 3}, TypeError, "`scatter` must be a function"),
        ({"sequential": "yes"}, TypeError, "`sequential` must be True, False or None, got 'yes'"),
        ({"precision_plugin": 16}, TypeError, "`precision_plugin` must be a Precision"),
        ({"checkpoint_io": "io"}, TypeError, "checkpoint_io"),
        ({"parallel": 2}, TypeError, "parallel"),
    ],
)
def test_wrong_arguments_are_refused_at_construction(arguments, error, message):
    with pytest.raises(error, match=message):
        DataParallelStrategy(**arguments)


@pytest.mark.parametrize("make", [pl.Trainer, Fabric])
def test_more_than_one_node_is_refused_at_construction(make):
    with pytest.raises(ValueError, match="`num_nodes=2`: `strategy='dp_ext'` is one process on one host"):
        make(strategy="dp_ext", accelerator="cpu", devices=2, num_nodes=2)


@pytest.mark.parametrize("make", [pl.Trainer, Fabric])
def test_several_processes_are_refused_at_construction(make, monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ValueError, match=r"started as 2 processes \(TorchElasticEnvironment\).* Start it once"):
        make(strategy="dp_ext", accelerator="cpu", devices=2)


def with_step(step):
    return type("Model", (MLP,), {"training_step": step})


class UpdatesByNumber(MLP):
    """A composition of two metrics, as some libraries log."""

    def __init__(self):
        super().__init__()
        self.sum_of_two = MeanMetric() + MeanMetric()

    def training_step(self, batch, batch_idx):
        self.sum_of_two.update(float(batch[0].sum()))
        return self.loss(batch)


def log_different_counts(self, batch, batch_idx):
    self.log("count", int(batch[0][0, 0] * 1000), reduce_fx="mean")
    return self.loss(batch)


def return_other_shapes(self, batch, batch_idx):
    return {
        "loss": self.loss(batch),
        "rows": torch.ones(2, 1 if batch[0][0, 0] > batch[0].mean() else int(batch[1][0]) + 2),
    }


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (UpdatesByNumber, "CompositionalMetric is given a number by each replica"),
        (with_step(log_different_counts), "replicas log different integers"),
        (with_step(return_other_shapes), "cannot be gathered"),
    ],
)
def test_an_unsupported_step_of_a_library_is_refused_with_another_strategy(model, message):
    with pytest.raises(ValueError, match=message) as caught:
        make_trainer("dp_ext").fit(model(), loader())
    assert "If the step is code of a library, use `strategy='ddp_ext'`." in str(caught.value)


class Lazy(MLP):
    def make_net(self):
        return nn.LazyLinear(3)


class Scripted(MLP):
    def make_net(self):
        return torch.jit.script(nn.Linear(8, 3))


class FetchesItself(MLP):
    def training_step(self, dataloader_iter):
        return self.loss(next(dataloader_iter)[0])


class HasCompiledPart(MLP):
    def make_net(self):
        return torch.compile(super().make_net(), backend="eager")


class HasPartCompiledInPlace(MLP):
    def make_net(self):
        net = super().make_net()
        net.compile(backend="eager")
        return net


@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (Lazy, "LazyLinear has parameters without a shape"),
        (Scripted, "ScriptModule"),
        (HasCompiledPart, "OptimizedModule is compiled.*Use `devices=1`"),
        (HasPartCompiledInPlace, "Sequential is compiled.*Use `devices=1`"),
        (FetchesItself, r"Use `training_step\(self, batch, batch_idx\)`"),
    ],
    ids=["lazy", "scripted", "compiled part", "part compiled in place", "dataloader_iter"],
)
def test_modules_that_cannot_be_replicated_are_refused_before_training(make_model, message):
    trainer = make_trainer("dp_ext", devices=2)
    with pytest.raises(ValueError, match=message):
        trainer.fit(make_model(), loader())
    assert trainer.global_step == 0


class Opaque:
    def __init__(self, samples):
        self.samples = samples


def collate_opaque(samples):
    return Opaque(samples)


def split_opaque(batch, num_replicas):
    parts = [batch.samples[start::num_replicas] for start in range(num_replicas)]
    return [(Opaque(part), len(part)) for part in parts if part]


class TakesOpaque(MLP):
    def loss(self, batch):
        return super().loss(torch.utils.data.default_collate(batch.samples))


def test_a_batch_without_a_first_dimension_is_refused_unless_the_user_splits_it():
    data = DataLoader(dataset(), batch_size=10, collate_fn=collate_opaque)
    trainer = make_trainer("dp_ext", devices=3)
    with pytest.raises(ValueError, match=r"Opaque.*`scatter` function"):
        trainer.fit(TakesOpaque(), data)
    models = []
    for strategy in (DataParallelStrategy(parallel_devices=[CPU] * 3, scatter=split_opaque), "auto"):
        pl.seed_everything(11, verbose=False)
        models.append(TakesOpaque())
        make_trainer(strategy, 1).fit(models[-1], data)
    assert_close(*map(state_of, models))


@pytest.mark.parametrize(
    ("scatter", "error", "message"),
    [
        (lambda batch, num: [batch], TypeError, "must return a list of pairs"),
        (lambda batch, num: [], ValueError, "returned 0 parts for 2 replicas"),
        (lambda batch, num: [(batch, 1)] * 3, ValueError, "returned 3 parts for 2 replicas"),
        (lambda batch, num: [(batch, -1)], ValueError, "negative numbers"),
    ],
)
def test_the_result_of_scatter_is_checked(scatter, error, message):
    trainer = make_trainer(DataParallelStrategy(scatter=scatter), devices=2)
    with pytest.raises(error, match=message):
        trainer.fit(MLP(), loader())


def test_a_batch_whose_parts_disagree_is_refused():
    def collate(samples):
        return torch.zeros(len(samples), 8), torch.zeros(7)

    with pytest.raises(ValueError, match=r"batch\[0\].*batch\[1\].*cannot be split|cannot be split.*batch\[0\]"):
        make_trainer("dp_ext", devices=2).fit(MLP(), DataLoader(dataset(), batch_size=10, collate_fn=collate))


class KeepsItsLoss(MLP):
    def training_step(self, batch, batch_idx):
        self.last_loss = self.loss(batch)
        return self.last_loss


class KeepsHiddenState(MLP):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(8, 3, batch_first=True)
        self.hidden = None

    def loss(self, batch):
        output, self.hidden = self.rnn(batch[0].unsqueeze(1), self.hidden)
        return nn.functional.cross_entropy(output[:, -1], batch[1])


class ReplacesInAList(MLP):
    def __init__(self):
        super().__init__()
        self.losses = [0.0]

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses[0] = loss.item()
        return loss


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (KeepsItsLoss, r"`self.last_loss` of KeepsItsLoss differently in each replica.*`strategy='ddp_ext'`"),
        (KeepsHiddenState, r"`self.hidden` of KeepsHiddenState"),
        (ReplacesInAList, r"the list `self.losses`, to which a step may only append"),
    ],
)
@each_mode
def test_state_that_would_be_lost_is_an_error_and_not_a_loss(make_strategy, make_model, message):
    trainer, model = make_trainer(make_strategy(2), 1), make_model()
    before = state_of(model)
    with pytest.raises(RuntimeError, match=message):
        trainer.fit(model, loader())
    assert_close(state_of(model), before)


class StepsInOne(ManualMLP):
    def training_step(self, batch, batch_idx):
        if (batch[1] == 0).sum() > 2:
            self.manual_backward(self.loss(batch))


@each_mode
def test_replicas_on_different_code_paths_raise_instead_of_waiting(make_strategy):
    with pytest.raises(RuntimeError, match=r"do not take the same path.*waits in self.manual_backward.*has returned"):
        make_trainer(make_strategy(2), 1).fit(StepsInOne(), loader(batch_size=16))


class Fails(MLP):
    num_failures = 1

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and len(batch[0]) == 3 and self.num_failures:
            raise KeyError("a bad sample")
        return self.loss(batch)


@each_mode
def test_an_exception_of_a_replica_has_its_traceback_and_training_can_continue(make_strategy):
    threads = threading.active_count()
    trainer, model = make_trainer(make_strategy(3), 1), Fails()
    with pytest.raises(KeyError, match="a bad sample") as caught:
        trainer.fit(model, loader(batch_size=10))
    assert caught.traceback[-1].name == "training_step"
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["This happened in replica 1 of 3."]
    assert threading.active_count() == threads
    model.num_failures = 0
    trainer.fit(model, loader(batch_size=10))
    assert trainer.global_step > 14


class FailsInBackward(MLP):
    """A model whose step handles a failure, as after running out of memory."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.caught = 0

    def training_step(self, batch, batch_idx):
        try:
            self.manual_backward(self.loss(batch).detach())
        except RuntimeError:
            self.caught += 1


@each_mode
def test_an_error_of_the_whole_batch_can_be_handled_in_the_step(make_strategy):
    _, model = train(make_strategy(2), FailsInBackward, max_epochs=1)
    assert model.caught == 7


SCRIPT = """
    import time
    from tests.support.models import MLP, loader, make_trainer

    class Sleeps(MLP):
        def training_step(self, batch, batch_idx):
            print("in a step", flush=True)
            time.sleep(1)
            return self.loss(batch)

    if __name__ == "__main__":
        make_trainer("dp_ext", devices=2).fit(Sleeps(), loader())
"""


@pytest.mark.processes
def test_ctrl_c_ends_training_as_it_does_with_one_device(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    process = start_script(script)
    try:
        assert any("in a step" in line for line in process.stdout)
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=300)
    finally:
        kill_tree(process.pid)
    assert time.monotonic() - started < 20
    assert "Detected KeyboardInterrupt" in output
    assert process.returncode == 1


class OtherLayerSync(LayerSync):
    def apply(self, model):
        return model

    def revert(self, model):
        return model


def test_a_layer_sync_between_processes_is_refused():
    with pytest.raises(ValueError, match=r"OtherLayerSync.* synchronizes layers between processes"):
        make_trainer("dp_ext", devices=2, plugins=[OtherLayerSync()]).fit(MLP(), loader())


class NormalisesTokens(WithBatchNorm):
    def loss(self, batch):
        logits = self.net(batch[0].repeat(2, 1))[: len(batch[0])]
        return nn.functional.cross_entropy(logits, batch[1])


def test_statistics_of_the_whole_batch_need_a_row_per_sample():
    with pytest.raises(ValueError, match="BatchNorm1d received 4 rows for 2 samples"):
        make_trainer("dp_ext", devices=2, sync_batchnorm=True).fit(NormalisesTokens(), loader())
