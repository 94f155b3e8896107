"""LightningCLI: `fit`, with the strategy on the command line, under both names of Lightning."""

import sys
from importlib import import_module
from typing import Any

from tests.clients.programs.common import DEVICES, STRATEGY, show, sums


def run(lightning: str) -> dict[str, Any]:
    """Returns the results of the commands with one of the two names of Lightning."""
    pl = import_module(lightning)
    cli_class = import_module(f"{lightning}.cli").LightningCLI
    demos = import_module(f"{lightning}.demos.boring_classes")
    options = {"accelerator": "cpu", "devices": DEVICES, "strategy": STRATEGY, "max_epochs": 1, "logger": "false"}
    arguments = [f"--trainer.{name}={value}" for name, value in {**options, "limit_train_batches": 4}.items()]
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    sys.argv[1:] = ["fit", "--seed_everything=1", *arguments, *quiet]
    cli = cli_class(demos.BoringModel, demos.BoringDataModule, save_config_callback=None)
    assert isinstance(cli.trainer, pl.Trainer)
    return {"weights": sums(cli.model), "steps": cli.trainer.global_step}


if __name__ == "__main__":
    show(**{name: run(name) for name in ("lightning.pytorch", "pytorch_lightning")})
