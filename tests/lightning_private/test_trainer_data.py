"""Behavior of Lightning that :mod:`lightning_strategies_ext._lightning.trainer_data` requires."""

from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from lightning_strategies_ext._lightning import (
    trainer_data,
    trainer_stages,
)
from tests.support.models import MLP, StatefulLoader, dataset, loader, make_trainer


def test_a_function_runs_after_the_loaders_are_created_and_can_be_removed() -> None:
    trainer = make_trainer("auto", devices=1, max_epochs=1)
    seen: list[tuple[int, Any]] = []
    undo = trainer_data.after_setup_data(
        trainer, lambda: seen.append((len(trainer.train_dataloader), trainer_data.data_fetcher_of(trainer)))
    )
    assert trainer_data.data_fetcher_of(trainer) is None
    trainer.fit(MLP(), loader(num_samples=64, batch_size=4))
    assert [length for length, _ in seen] == [16] * len(seen)
    assert seen
    assert seen[0][1].combined_loader.flattened == [trainer.train_dataloader]
    undo()
    undo()
    assert "setup_data" not in vars(trainer.fit_loop)


class Halved:
    """A fetcher that returns every second batch of another fetcher."""

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "inner", inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)

    def __iter__(self) -> "Halved":
        iter(self.inner)
        return self

    def __next__(self) -> Any:
        next(self.inner)
        return next(self.inner)


class Batches(Callback):
    def __init__(self) -> None:
        self.first: list[torch.Tensor] = []
        self.num_validations = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.first.append(batch[0][0])

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.num_validations += 1


@pytest.mark.parametrize(("interval", "num_validations"), [(1.0, 2), (0.5, 4)])
def test_fit_takes_its_batches_from_a_replaced_data_fetcher(interval: float, num_validations: int) -> None:
    batches = Batches()
    trainer = make_trainer("auto", devices=1, max_epochs=2, callbacks=[batches], val_check_interval=interval)
    data = loader(num_samples=64, batch_size=4)

    def halve() -> None:
        fetcher = trainer_data.data_fetcher_of(trainer)
        if not isinstance(fetcher, Halved):
            trainer_data.set_data_fetcher(trainer, Halved(fetcher), 8)

    trainer_data.after_setup_data(trainer, halve)
    trainer.fit(MLP(), data, loader(num_samples=4))
    expected = [features[0] for features, _ in list(data)[1::2]]
    assert torch.equal(torch.stack(batches.first), torch.stack(expected * 2))
    assert trainer.num_training_batches == 8
    assert batches.num_validations == num_validations


def test_reset_validation_loaders_are_loaded_again() -> None:
    made: list[Any] = []

    class Model(MLP):
        def train_dataloader(self) -> Any:
            return loader(num_samples=8)

        def val_dataloader(self) -> Any:
            made.append(loader(num_samples=8))
            return made[-1]

        def on_train_epoch_start(self) -> None:
            trainer_data.reset_validation_loaders(self.trainer)
            assert self.trainer.val_dataloaders is None

    trainer = make_trainer("auto", devices=1, max_epochs=2)
    trainer.fit(Model())
    assert len(made) == 3  # one for the sanity check, and one per epoch
    assert trainer.val_dataloaders is made[2]


def test_reset_training_loaders_are_loaded_again():
    trainer = make_trainer("auto", devices=1, max_epochs=2)
    seen = []

    def before_epoch() -> None:
        seen.append(trainer.train_dataloader)
        trainer_data.reset_training_loaders(trainer)
        assert trainer.train_dataloader is None

    undo = trainer_stages.wrap_fit_loop(trainer, lambda train: train(), lambda train: train(), before_epoch)
    made = []

    class Model(MLP):
        def train_dataloader(self) -> Any:
            made.append(loader(num_samples=8))
            return made[-1]

    trainer.fit(Model())
    undo()
    assert len(made) == 3
    assert len(seen) == 2


def test_pending_loader_states_can_be_read_before_they_are_loaded(tmp_path):
    class Stateful(torch.utils.data.DataLoader):
        def state_dict(self) -> dict[str, Any]:
            return {"at": 3}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            loaded.append(state)

    loaded: list[Any] = []
    announced: list[Any] = []

    class Model(MLP):
        def train_dataloader(self) -> Any:
            announced.append(trainer_data.pending_loader_states(self.trainer))
            return Stateful(loader(num_samples=32).dataset, batch_size=4)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2 and not path.exists():
                self.trainer.save_checkpoint(path)

    path = tmp_path / "middle.ckpt"
    make_trainer("auto", devices=1, max_epochs=1).fit(Model())
    assert announced == [[]]
    make_trainer("auto", devices=1, max_epochs=1).fit(Model(), ckpt_path=path)
    assert announced == [[], [{"at": 3}]]
    assert loaded == [{"at": 3}]


def test_data_sources_finds_the_data_of_a_stage() -> None:
    trainer = make_trainer("auto", devices=1)
    train, val = loader(), loader()
    trainer.fit(MLP(), train, val)
    data = trainer_data.data_sources(trainer)
    assert any(item is train for item in data)
    assert any(item is val for item in data)


def test_the_positions_of_loaders_are_those_of_a_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer("auto", devices=1, max_epochs=1, limit_train_batches=3)
    assert trainer_data.current_loader_states(trainer) == []
    trainer.fit(MLP(), StatefulLoader(dataset(), batch_size=4))
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    checkpoint = torch.load(tmp_path / "end.ckpt", weights_only=False)
    states = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert trainer_data.current_loader_states(trainer) == states == [{"position": 3}]


def test_a_rank_without_batches_runs_the_hooks_if_another_rank_has_batches() -> None:
    called: list[str] = []

    class Evaluates(MLP):
        def on_validation_epoch_end(self) -> None:
            called.append("validation")

        def on_predict_epoch_end(self) -> None:
            called.append("predict")

    empty = torch.utils.data.DataLoader(torch.utils.data.Subset(dataset(), []))
    for stage in (TrainerFn.VALIDATING, TrainerFn.PREDICTING):
        for num_ranks in (0, 1):
            module, trainer = Evaluates(), make_trainer("auto", devices=1)
            module.allow_zero_length_dataloader_with_multiple_devices = True
            trainer.state.fn = stage
            trainer.strategy._lightning_module = module
            undo = trainer_data.evaluate_without_data(trainer, lambda _, num=num_ranks: [num])
            if stage == TrainerFn.VALIDATING:
                trainer.validate(module, empty, verbose=False)
            else:
                trainer.predict(module, empty)
            undo()
    assert called == ["validation", "predict"]


@pytest.mark.parametrize(("sizes", "expected"), [((8,), [True]), ((0, 8), [False, True])])
def test_a_function_runs_after_the_last_step_of_each_loader(sizes: tuple[int, ...], expected: list[bool]) -> None:
    calls: list[tuple[bool, int]] = []
    steps: list[int] = []

    class Evaluates(MLP):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            steps.append(dataloader_idx)

    module, trainer = Evaluates(), make_trainer("auto", devices=1)
    module.allow_zero_length_dataloader_with_multiple_devices = True
    trainer.state.fn = TrainerFn.VALIDATING
    undo = trainer_data.before_loader_results(trainer, lambda has_run: calls.append((has_run, len(steps))))
    trainer.validate(module, [loader(num_samples=size) for size in sizes], verbose=False)
    undo()
    assert [has_run for has_run, _ in calls] == expected
    assert calls[-1][1] == len(steps)


@pytest.mark.parametrize("is_whole_stage", [False, True])
def test_a_rank_gets_an_empty_share_of_few_samples(is_whole_stage: bool) -> None:
    trainer = make_trainer("ddp_ext")
    loader_of_one = torch.utils.data.DataLoader(torch.utils.data.Subset(dataset(), [0]))
    connector = trainer._data_connector
    trainer.state.fn = TrainerFn.PREDICTING
    if is_whole_stage:
        undo = trainer_data.evaluate_together(trainer, lambda flags: [1] * len(flags)).close
    else:
        undo = trainer_data.predict_with_few_samples(trainer)
    shares = []
    for rank in range(2):
        trainer.strategy._global_rank = rank
        trainer.strategy.cluster_environment.set_global_rank(rank)
        share = connector._resolve_sampler(loader_of_one, shuffle=False, mode=RunningStage.PREDICTING)
        shares.append((len(share), [*share]))
    undo()
    assert shares == [(1, [0]), (0, [])]


@pytest.mark.parametrize("number", [1, 5])
def test_shards_of_an_evaluation_repeat_no_sample(number: int) -> None:
    trainer, shards = make_trainer("ddp_ext"), WeakSet[Any]()
    trainer.strategy._lightning_module = MLP()
    connector = trainer._data_connector
    undo = trainer_data.shard_without_repeats(trainer, shards)
    samples = torch.utils.data.DataLoader(torch.utils.data.Subset(dataset(), range(number)))
    found = []
    for rank in range(2):
        trainer.strategy._global_rank = rank
        trainer.strategy.cluster_environment.set_global_rank(rank)
        sampler = connector._resolve_sampler(samples, shuffle=False, mode=RunningStage.VALIDATING)
        assert sampler in shards
        assert len(sampler) == len([*sampler])
        found += [*sampler]
        repeating = connector._resolve_sampler(samples, shuffle=False, mode=RunningStage.TRAINING)
        assert len(repeating) == (number + 1) // 2
    undo()
    assert sorted(found) == [*range(number)]
    assert "_resolve_sampler" not in vars(connector)


class ThreeSteps:
    """Steps of an evaluation in which this rank has two batches, and another rank has three."""

    def __init__(self, called: list[str]) -> None:
        self.local, self.called = [2], called

    def agree(self, loaders: Any, *, is_sequential: bool) -> list[int]:
        raise NotImplementedError

    def shadow(self, fetcher: Any, limit: float, *, draws_for_the_step: bool) -> Any:
        assert draws_for_the_step
        items = [*fetcher]
        self.called.append(f"{len(items)} of at most {limit}")
        return ThreeItems([*items, items[-1]])

    @contextmanager
    def wrap_step(self) -> Any:
        self.called.append("step")
        yield

    @contextmanager
    def wrap_evaluation(self) -> Any:
        self.called.append("begin")
        yield
        self.called.append("end")


class ThreeItems:
    def __init__(self, items: list[Any]) -> None:
        self.items, self.done = items, False

    def __next__(self) -> Any:
        if not self.items:
            raise StopIteration
        return self.items.pop(0)

    def teardown(self) -> None:
        pass


def test_an_evaluation_runs_the_steps_that_other_ranks_run() -> None:
    trainer, called = make_trainer("auto", devices=1), []
    trainer.state.fn = TrainerFn.VALIDATING
    stack = trainer_data.shadow_evaluation_steps(trainer, ThreeSteps(called))
    trainer.validate(MLP(), loader(num_samples=64, batch_size=16), verbose=False)
    stack.close()
    assert called == ["begin", "2 of at most inf", "step", "step", "step", "end"]
    assert trainer.num_val_batches == [4]
    assert {"run", "reset", "_evaluation_step"}.isdisjoint(vars(trainer.validate_loop))
