"""Optimizers, gradients, and precision with ``dp_ext`` equal those of one device on the whole batch."""

import pytest
import torch
import torch.utils.checkpoint
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional
from torchmetrics import MeanMetric

from tests.support.dp_training import assert_trains_alike, each_mode, train
from tests.support.models import MLP, NUM_CLASSES, ManualMLP, TwoOptimizers, assert_close, state_of


@each_mode
def test_several_optimizers_step_alike_under_manual_optimization(make_strategy):
    assert_trains_alike(make_strategy(3), TwoOptimizers)


class Gan(MLP):
    """A GAN: two toggled optimizers, schedulers, clipping, and a loss from updated weights."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(NUM_CLASSES, 1)

    def training_step(self, batch, batch_idx):
        generator, critic = self.optimizers()
        with generator.toggle_model():
            loss = -self.critic(self.net(batch[0])).mean() + self.loss(batch)
            generator.zero_grad()
            self.manual_backward(loss)
            assert all(parameter.grad is None or parameter.is_leaf for parameter in self.critic.parameters())
            self.clip_gradients(generator, 0.5, "norm")
            generator.step()
        self.toggle_optimizer(critic)
        score = self.critic(self.net(batch[0]).detach()).mean()  # with the updated weights of the generator
        critic.zero_grad()
        self.manual_backward(score)
        critic.step()
        self.untoggle_optimizer(critic)
        by_step, on_plateau = self.lr_schedulers()
        by_step.step()
        on_plateau.step(score.detach())
        self.log_dict({"score": score, "lr": generator.param_groups[0]["lr"], "other_lr": critic.param_groups[0]["lr"]})

    def configure_optimizers(self):
        generator = torch.optim.Adam(self.net.parameters(), lr=0.01)
        critic = torch.optim.SGD(self.critic.parameters(), lr=0.01)
        by_step = torch.optim.lr_scheduler.StepLR(generator, 5, gamma=0.5)
        on_plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(critic, patience=1, factor=0.5)
        return [generator, critic], [by_step, {"scheduler": on_plateau, "monitor": "score"}]


@each_mode
def test_a_gan_trains_alike(make_strategy):
    assert_trains_alike(make_strategy(3), Gan)


class WithClosure(ManualMLP):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        self.log("loss", optimizer.step(closure=closure))

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


@each_mode
def test_a_closure_runs_in_all_replicas_as_often_as_the_optimizer_asks(make_strategy):
    assert_trains_alike(make_strategy(2), WithClosure, precision="64-true")  # L-BFGS amplifies rounding


class WithLbfgs(MLP):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


@pytest.mark.parametrize(
    ("make_model", "kwargs"),
    [
        (MLP, {"accumulate_grad_batches": 3}),
        (MLP, {"gradient_clip_val": 0.1}),
        (MLP, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        (MLP, {"precision": "64-true"}),
        (WithLbfgs, {"precision": "64-true"}),
    ],
    ids=["accumulation", "clipping by norm", "clipping by value", "double precision", "LBFGS"],
)
@each_mode
def test_gradient_options_of_the_trainer_have_the_effect_of_one_device(make_strategy, make_model, kwargs):
    assert_trains_alike(make_strategy(3), make_model, **kwargs)


def test_a_schedule_of_accumulation_is_followed():
    trainers = [
        train(strategy, devices=devices, max_epochs=3, callbacks=[GradientAccumulationScheduler({0: 1, 1: 4})])
        for strategy, devices in (("dp_ext", 3), ("auto", 1))
    ]
    assert trainers[0][0].global_step == trainers[1][0].global_step
    assert_close(*[state_of(model) for _, model in trainers])


class RecordsDtypes(MLP):
    def __init__(self):
        super().__init__()
        self.seen = []

    def loss(self, batch):
        logits = self.net(batch[0])
        self.seen.append(logits.dtype)
        return functional.cross_entropy(logits, batch[1])


@pytest.mark.parametrize(
    ("make_precision", "dtype"),
    [
        (lambda: MixedPrecision("bf16-mixed", "cpu"), torch.bfloat16),
        (lambda: MixedPrecision("16-mixed", "cpu"), torch.float16),
    ],
    ids=["bf16-mixed", "16-mixed"],
)
@each_mode
def test_mixed_precision_reaches_the_replicas(make_strategy, make_precision, dtype):
    ext = train(make_strategy(2), RecordsDtypes, plugins=[make_precision()])
    single = train("auto", RecordsDtypes, plugins=[make_precision()])
    assert set(ext[1].seen) == {dtype}
    assert_close(state_of(ext[1]), state_of(single[1]), tolerance=2e-2)
    scalers = [trainer.precision_plugin.scaler for trainer, _ in (ext, single)]
    if dtype is torch.float16:
        assert scalers[0].state_dict() == scalers[1].state_dict()


class StepsWithAMetric(ManualMLP):
    """A model whose scheduler receives the value of a metric, which is the value of the batch."""

    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.lr_schedulers().step(self.mean(batch[0].flatten()))
        self.log("mean", self.mean.compute())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [{"scheduler": scheduler, "monitor": "mean"}]


@each_mode
def test_a_scheduler_receives_the_exact_value_of_a_metric(make_strategy):
    trainer, _ = train(make_strategy(3), StepsWithAMetric, limit_train_batches=1, max_epochs=1)
    assert trainer.lr_scheduler_configs[0].scheduler.best == trainer.callback_metrics["mean"]
