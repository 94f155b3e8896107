"""gluonts: DeepAR on a stream of samples, with a Trainer that the library creates from `trainer_kwargs`."""

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from gluonts.dataset.pandas import PandasDataset
from gluonts.torch import DeepAREstimator

from tests.clients.programs.common import DISTRIBUTION, QUIET, show, sums

if __name__ == "__main__":
    pl.seed_everything(1, verbose=False)
    hours = pd.date_range("2020-01-01", periods=120, freq="h")
    series = {f"s{n}": pd.Series(3 + np.sin(np.arange(120) / 5 + n), index=hours) for n in range(8)}
    estimator = DeepAREstimator(
        freq="h",
        prediction_length=6,
        context_length=24,
        hidden_size=8,
        num_layers=1,
        dropout_rate=0.0,
        batch_size=8,
        num_batches_per_epoch=5,
        trainer_kwargs={**DISTRIBUTION, **QUIET, "max_epochs": 2},
    )
    predictor = estimator.train(PandasDataset(series))
    show(weights=sums(predictor.prediction_net))
