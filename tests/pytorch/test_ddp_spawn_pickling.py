"""Objects with custom pickling return from a stage of ``ddp_spawn_ext`` as pickle restores them, in place."""

import copyreg
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from tests.support.ddp_spawn_trainers import ALONE
from tests.support.models import MLP, loader, make_trainer

pytestmark = pytest.mark.processes


class ChangesBack:
    """An object with a value that is pickled in a different form, and a value that is derived from other attributes."""

    def begin(self) -> None:
        self.generator = torch.Generator()
        self.seen: list[int] = []
        self.steps = 0
        self.log_line = self.line
        self.goes = 1

    def line(self) -> str:
        return f"{self.steps} steps"

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self).copy()
        del state["log_line"]
        state["generator"] = state["generator"].get_state()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.generator = torch.Generator()
        self.generator.set_state(state["generator"])
        self.log_line = self.line

    def count(self) -> None:
        self.steps += 1
        self.seen.append(self.steps)
        torch.rand(1, generator=self.generator)
        vars(self).pop("goes", None)


class SubmoduleChangesBack(ChangesBack, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2).requires_grad_(False)
        self.begin()


class CallbackChangesBack(ChangesBack, pl.Callback):
    def __init__(self) -> None:
        self.begin()


class PlainChangesBack(ChangesBack):
    def __init__(self) -> None:
        self.begin()


class StateThroughProperty(pl.Callback):
    """A callback whose state has the name of a property, not of an attribute."""

    def __init__(self) -> None:
        self._steps = 0

    @property
    def steps(self) -> int:
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._steps = value

    def __getstate__(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def count(self) -> None:
        self._steps += 1


class Reduced(pl.Callback):
    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.me = self

    def __reduce__(self) -> Any:
        return Reduced, (self.steps,)

    def count(self) -> None:
        self.steps += 1


class ReducedByFunction(pl.Callback):
    def __init__(self) -> None:
        self.steps = 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        return made, (self.steps,)

    def count(self) -> None:
        self.steps += 1


def made(steps: int) -> ReducedByFunction:
    callback = ReducedByFunction()
    callback.steps = steps
    return callback


class Registered(pl.Callback):
    def __init__(self, steps: int = 0) -> None:
        self.steps = [steps]

    def count(self) -> None:
        self.steps[0] += 1


copyreg.pickle(Registered, lambda obj: (Registered, (obj.steps[0],)))


class Slotted(pl.Callback):
    __slots__ = ("__hidden", "goes", "steps")

    def __init__(self) -> None:
        self.steps = self.goes = self.__hidden = 0

    def count(self) -> None:
        self.steps += 1
        self.__hidden += 1
        if hasattr(self, "goes"):
            del self.goes

    def hidden(self) -> int:
        return self.__hidden


class Rebinds(pl.Callback):
    """A callback that assigns its list to a different attribute, and creates a new list."""

    def __init__(self) -> None:
        self.current: list[int] = []
        self.best: list[int] = []
        self.steps = 0

    def count(self) -> None:
        self.steps += 1
        self.current.append(self.steps)
        if self.steps == 2:
            self.best, self.current = self.current, []


class Counts(MLP):
    def __init__(self, callbacks: Any) -> None:
        super().__init__()
        self.part = SubmoduleChangesBack()
        self.plain = PlainChangesBack()
        self.metric_elsewhere = [MeanMetric()]
        self.counted = [self.part, self.plain, *callbacks]

    def training_step(self, batch, batch_idx):
        for each in self.counted:
            each.count()
        self.metric_elsewhere[0].update(float(batch_idx))
        self.metric_elsewhere[0].eval()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("strategy", "more"),
    [("auto", None), ("ddp_spawn_ext", None), ("ddp_fork_ext", None), ("ddp_fork_ext", lambda: (yield))],
    ids=["one process", "sent", "sent to forked", "inherited"],
)
def test_objects_that_pickle_themselves_return_as_pickle_restores_them(strategy, more):
    slotted, rebinds = Slotted(), Rebinds()
    callbacks = CallbackChangesBack(), StateThroughProperty(), Reduced(0), ReducedByFunction(), Registered()
    callbacks = *callbacks, slotted, rebinds
    model = Counts(callbacks)
    model.more = more() if more else None
    held = [(each, each.seen, vars(each)) for each in (model.part, callbacks[0], model.plain)]
    metric, layer, weight = model.metric_elsewhere[0], model.part.layer, model.part.layer.weight
    trainer = make_trainer(strategy, **ALONE, max_epochs=1, limit_train_batches=3, callbacks=list(callbacks))
    trainer.fit(model, loader())
    expected = torch.Generator()
    _ = [torch.rand(1, generator=expected) for _ in range(3)]
    assert model.part is model.counted[0]
    assert model.plain is model.counted[1]
    assert model.part.layer is layer
    assert model.part.layer.weight is weight is dict(model.named_parameters())["part.layer.weight"]
    for each, seen, _ in held:
        assert isinstance(each.generator, torch.Generator)
        assert torch.equal(each.generator.get_state(), expected.get_state())
        assert each.seen is seen
        assert (each.steps, seen, hasattr(each, "goes")) == (3, [1, 2, 3], False)
        assert each.log_line.__self__ is each
    assert all(one is other for one, other in zip(callbacks, model.counted[2:], strict=True))
    assert [callback.steps for callback in callbacks] == [3, 3, 3, 3, [3], 3, 3]
    assert "steps" not in vars(callbacks[1])
    assert callbacks[2].me is callbacks[2]
    assert (slotted.hidden(), hasattr(slotted, "goes")) == (3, False)
    assert (rebinds.best, rebinds.current) == ([1, 2], [3])
    assert metric is model.metric_elsewhere[0]
    metric.update(5.0)
    assert (metric.update_count, metric.compute(), metric.training) == (4, 2.0, False)
    trainer.test(model, loader(), verbose=False)
    assert isinstance(model.part.generator, torch.Generator)
