"""pytorch-forecasting: a temporal fusion transformer, whose output class is created at run time."""

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import torch
from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet

from tests.clients.programs.common import DEVICES, STRATEGY, show, sums, trainer

if __name__ == "__main__":
    rng = np.random.default_rng(0)
    steps = np.arange(60)
    series = [
        pd.DataFrame({"name": str(n), "step": steps, "value": 3 + np.sin(steps / 5 + n) + rng.normal(0, 0.1, 60)})
        for n in range(8)
    ]
    data = TimeSeriesDataSet(
        pd.concat(series, ignore_index=True),
        time_idx="step",
        target="value",
        group_ids=["name"],
        max_encoder_length=12,
        max_prediction_length=6,
        static_categoricals=["name"],
        time_varying_known_reals=["step"],
        time_varying_unknown_reals=["value"],
    )
    pl.seed_everything(1, verbose=False)
    model = TemporalFusionTransformer.from_dataset(
        data, hidden_size=8, hidden_continuous_size=4, attention_head_size=1, dropout=0.0, loss=QuantileLoss()
    )
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.01)
    fitting = trainer(max_steps=10)
    fitting.fit(model, data.to_dataloader(train=True, batch_size=16))
    weights = sums(model)
    predicted = model.predict(
        TimeSeriesDataSet.from_dataset(data, pd.concat(series, ignore_index=True), predict=True).to_dataloader(
            train=False, batch_size=2
        ),
        trainer_kwargs={"accelerator": "cpu", "strategy": STRATEGY, "devices": DEVICES, "logger": False},
    )
    show(weights=weights, is_tensor=isinstance(predicted, torch.Tensor))
