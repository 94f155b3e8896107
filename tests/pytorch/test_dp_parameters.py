"""Steps of ``dp_ext`` that write to parameters and buffers: the results of one device, or an error."""

import copy

import pytest
import torch
from torch import nn

from tests.support.dp_training import each_mode, train
from tests.support.models import MLP, NUM_CLASSES, NUM_FEATURES, assert_close, loader, state_of

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*log_every_n_steps")


class WithTarget(MLP):
    """A model with a target network, which follows the trained network."""

    def __init__(self):
        super().__init__()
        self.target = copy.deepcopy(self.net)

    @torch.no_grad()
    def follow(self, *args, **kwargs):
        for average, parameter in zip(self.target.parameters(), self.net.parameters(), strict=True):
            average.lerp_(parameter, 0.1)

    def follow_through_data(self):
        for average, parameter in zip(self.target.parameters(), self.net.parameters(), strict=True):
            average.data.copy_(0.9 * average.data + 0.1 * parameter.data)

    def follow_with_other_data(self):
        for average, parameter in zip(self.target.parameters(), self.net.parameters(), strict=True):
            average.data = 0.9 * average.data + 0.1 * parameter.data

    @torch.no_grad()
    def follow_all_at_once(self):
        torch._foreach_lerp_(list(self.target.parameters()), list(self.net.parameters()), 0.1)

    def clamp(self):
        for parameter in self.net.parameters():
            parameter.data.clamp_(-0.1, 0.1)

    def nothing(self):
        pass

    update_in_step = nothing

    def training_step(self, batch, batch_idx):
        self.update_in_step()
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


WRITES = ("follow", "follow_through_data", "follow_with_other_data", "follow_all_at_once", "clamp")


@pytest.mark.parametrize("write", WRITES)
@each_mode
def test_a_write_to_a_parameter_within_a_step_is_refused(make_strategy, write):
    model = type("Model", (WithTarget,), {"update_in_step": getattr(WithTarget, write)})
    layer = "net" if write == "clamp" else "target"
    with pytest.raises(RuntimeError, match=rf"`{layer}\.\d\.\w+` in place\. .*`on_train_batch_end`.*step_post_hook`"):
        train(make_strategy(3), model)


class WritesBetweenSteps(WithTarget):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.update_in_step()


@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_a_parameter_between_optimizer_steps_is_refused(write):
    model = type("Model", (WritesBetweenSteps,), {"update_in_step": getattr(WithTarget, write)})
    with pytest.raises(RuntimeError, match="in place"):
        train("dp_ext", model, devices=2)


def test_a_write_to_a_parameter_in_a_validation_step_is_refused():
    class Model(WithTarget):
        def validation_step(self, batch, batch_idx):
            self.follow_through_data()

    with pytest.raises(RuntimeError, match=r"the parameter `target\.\d\.\w+` in place"):
        train("dp_ext", Model, devices=2)


class FollowsAfterBatches(WithTarget):
    on_train_batch_end = WithTarget.follow


class FollowsAfterOptimizersSteps(WritesBetweenSteps):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(self.follow)
        return optimizer


class FollowsAfterBackward(WithTarget):
    on_after_backward = WithTarget.follow


class RenormsEmbeddings(MLP):
    """A model whose embedding writes to the rows of each lookup."""

    def make_net(self):
        return nn.Sequential(nn.Embedding(10, 4, max_norm=0.5), nn.Flatten(), nn.Linear(4 * NUM_FEATURES, NUM_CLASSES))

    def loss(self, batch):
        return super().loss((batch[0].abs().mul(3).long().clamp(max=9), batch[1]))


@pytest.mark.parametrize(
    "make_model", [FollowsAfterBatches, FollowsAfterOptimizersSteps, FollowsAfterBackward, RenormsEmbeddings]
)
def test_an_action_that_runs_once_may_write_to_parameters(make_model):
    assert_close(state_of(train("dp_ext", make_model, devices=3)[1]), state_of(train("auto", make_model)[1]))


class Parametrized(MLP):
    """A model with torch's parametrizations: buffers that forward passes update, and computed weights."""

    def make_net(self):
        return nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(NUM_FEATURES, 16)),
            nn.ReLU(),
            nn.utils.parametrizations.orthogonal(nn.Linear(16, 16)),
            nn.utils.parametrizations.weight_norm(nn.Linear(16, NUM_CLASSES)),
        )


@each_mode
def test_parametrized_weights_and_their_buffers_are_those_of_one_device(make_strategy):
    assert_close(state_of(train(make_strategy(3), Parametrized)[1]), state_of(train("auto", Parametrized)[1]))


class KeepsAverageInBuffers(MLP):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(16))
        self.register_buffer("of_batches", torch.zeros(NUM_FEATURES))

    def training_step(self, batch, batch_idx):
        self.average.mul_(0.9).add_(self.net[0].bias.detach(), alpha=0.1)
        self.of_batches.lerp_(batch[0].mean(0), 0.5)
        return self.loss(batch)


@each_mode
def test_a_buffer_that_is_updated_in_place_keeps_the_first_replicas_update(make_strategy):
    ext, single = train(make_strategy(2), KeepsAverageInBuffers)[1], train("auto", KeepsAverageInBuffers)[1]
    torch.testing.assert_close(ext.average, single.average)
    expected = torch.zeros(NUM_FEATURES)
    for _ in range(2):
        for features, _ in loader(64, batch_size=10):
            expected.lerp_(features.tensor_split(2)[0].mean(0), 0.5)
    torch.testing.assert_close(ext.of_batches, expected)
