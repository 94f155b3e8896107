"""After each epoch, ranks compare learning rates and other values that must be equal; an error names the difference."""

import re
from typing import Any

import pytest
import torch

from lightning_strategies_ext import ChecksOptions, DDPStrategy, HorovodStrategy, RankDisagreementError
from lightning_strategies_ext.pytorch.epoch_checks import _describe
from tests.support.horovod_ranks import run_horovod
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import run_ranks

ADVICE = (
    " Their weights would differ more with each step. Set the value alike on all ranks: it must not depend on the rank,"
    " on random numbers, or on a value that is logged without `sync_dist=True`. If it differs on purpose, pass"
    " `checks=ChecksOptions(excluded_fields=('lr',))` to the strategy."
)


def test_the_error_names_optimizer_group_field_and_the_ranks_of_each_value() -> None:
    equal = {("optimizer 0 (SGD), group 0", "lr"): "0.1", ("", "optimizer_steps"): "4"}
    own = {("optimizer 0 (SGD), group 1", "lr"): "0.1", **equal}
    other = {("optimizer 0 (SGD), group 1", "lr"): "0.2", **equal}
    text = _describe({0: own, 1: other, 2: own, 3: equal}, 5, 7)
    listed = "0.1 on ranks 0 and 2, 0.2 on rank 1, missing on rank 3 (5 more ranks differ from rank 0)."
    start = "The ranks differ in `lr` of optimizer 0 (SGD), group 1 after epoch 7: "
    assert text == f"{start}{listed}{ADVICE}"


def test_the_description_counts_the_fields_that_differ() -> None:
    names = (("a", "lr"), ("b", "lr"), ("", "optimizer_steps"))
    text = _describe({rank: {name: str(rank) for name in names} for rank in (0, 1)}, 0, 1)
    assert "`lr` of a after epoch 1: 0 on rank 0, 1 on rank 1. 2 other fields differ, too. Their" in text


def test_options_are_checked() -> None:
    assert ChecksOptions(excluded_fields=["lr"]).excluded_fields == ("lr",)  # as from a configuration file
    for fields in ("lr", (1,), {"lr"}):
        with pytest.raises(TypeError, match="`excluded_fields` must be a tuple of names, got "):
            ChecksOptions(excluded_fields=fields)
    with pytest.raises(ValueError, match=r"the field 'betas' is unknown. Use some of lr, weight_decay, momentum, opt"):
        ChecksOptions(excluded_fields=("lr", "betas"))
    with pytest.raises(TypeError, match="`checks` must be a ChecksOptions, got 'lr'"):
        DDPStrategy(checks="lr")


class ChangesOnRank1(MLP):
    """A model that changes a field of one parameter group on rank 1 in the second epoch."""

    def __init__(self, field: str) -> None:
        super().__init__()
        self.field = field

    def configure_optimizers(self) -> Any:
        first, _, last = self.net
        groups = [{"params": first.parameters()}, {"params": last.parameters()}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1 and self.global_rank == 1:
            if self.field in ("lr", "momentum", "weight_decay"):
                self.optimizers().param_groups[1][self.field] = 0.25
            if self.field == "sampler_seed":
                self.trainer.train_dataloader.sampler.seed = 5
            if self.field == "optimizer_steps":
                progress = self.trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
                progress.optimizer.step.total.completed = 3


EXPECTED = {
    "lr": "`lr` of optimizer 0 (SGD), group 1 after epoch 1: 0.1 on rank 0, 0.25 on rank 1.",
    "momentum": "`momentum` of optimizer 0 (SGD), group 1 after epoch 1: 0.9 on rank 0, 0.25 on rank 1.",
    "weight_decay": "`weight_decay` of optimizer 0 (SGD), group 1 after epoch 1: 0 on rank 0, 0.25 on rank 1.",
    "optimizer_steps": "`optimizer_steps` after epoch 1: 4 on rank 0, 3 on rank 1.",
    "sampler_seed": "`sampler_seed` of DataLoader 0 after epoch 1: 1 on rank 0, 6 on rank 1.",
}


def train(strategy: Any, field: str) -> str | None:
    """Returns the text of the error, or None if the training of three epochs ends."""
    trainer = make_trainer(strategy, max_epochs=3)
    try:
        trainer.fit(ChangesOnRank1(field), loader(16, shuffle=True))
    except RankDisagreementError as error:
        assert trainer.current_epoch == 2
        return str(error)
    assert trainer.current_epoch == 3
    return None


def train_with_each(new_strategy: Any) -> dict[str, str | None]:
    found = {field: train(new_strategy(), field) for field in ("nothing", *EXPECTED)}
    for field in EXPECTED:
        checks = ChecksOptions(excluded_fields=(field,))
        found[f"{field} excluded"] = train(new_strategy(checks=checks), field)
    return found


def assert_found(ranks: list[dict[str, str | None]]) -> None:
    for found in ranks:
        for field, text in EXPECTED.items():
            assert re.match(re.escape(f"The ranks differ in {text}"), found[field] or ""), found[field]
        assert [found[name] for name in found if name not in EXPECTED] == [None] * 6


def train_with_ddp() -> dict[str, str | None]:
    return {**train_with_each(DDPStrategy), "local SGD": train(DDPStrategy(compression="localsgd"), "lr")}


@pytest.mark.processes
def test_all_ranks_raise_the_error_unless_the_field_is_excluded() -> None:
    ranks = run_ranks(train_with_ddp)
    assert [found.pop("local SGD") for found in ranks] == [None, None]
    assert_found(ranks)


def train_with_horovod() -> dict[str, str | None]:
    return train_with_each(HorovodStrategy)


@pytest.mark.processes
def test_ranks_of_horovod_raise_the_error() -> None:
    pytest.importorskip("horovod")
    assert_found(run_horovod("horovodrun", train_with_horovod))


@pytest.mark.processes
def test_spawned_workers_raise_it_in_the_main_process() -> None:
    for strategy in ("ddp_spawn_ext", "ddp_spawn_elastic_ext"):
        assert (train_of_workers(strategy) or "").startswith(f"The ranks differ in {EXPECTED['lr']}")


def train_of_workers(strategy: str) -> str | None:
    try:
        make_trainer(strategy, max_epochs=3).fit(ChangesOnRank1("lr"), loader(16))
    except RankDisagreementError as error:
        return str(error)
    return None
