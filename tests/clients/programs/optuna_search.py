"""Optuna: a search with a pruning callback, whose reports are stored in a database."""

import lightning.pytorch as pl
import optuna
from optuna_integration import PyTorchLightningPruningCallback

from tests.clients.programs.common import Classifier, show, trainer


def objective(trial: optuna.Trial) -> float:
    pruning = PyTorchLightningPruningCallback(trial, monitor="val_loss")
    pl.seed_everything(1, verbose=False)
    fitting = trainer(max_epochs=4, callbacks=[pruning])
    fitting.fit(Classifier(trial.suggest_float("lr", 1e-4, 1e-1, log=True)))
    pruning.check_pruned()
    return fitting.callback_metrics["val_loss"].item()


if __name__ == "__main__":
    study = optuna.create_study(
        storage="sqlite:///study.db",
        sampler=optuna.samplers.RandomSampler(seed=1),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
    )
    study.optimize(objective, n_trials=5)
    show(
        states=[trial.state.name for trial in study.trials],
        reported=[list(trial.intermediate_values.values()) for trial in study.trials],
    )
