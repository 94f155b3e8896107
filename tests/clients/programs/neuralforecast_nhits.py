"""neuralforecast: NHITS, whose Trainer the library creates, `fit` and `predict`."""

import numpy as np
import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS

from tests.clients.programs.common import DISTRIBUTION, QUIET, show, sums

if __name__ == "__main__":
    rng = np.random.default_rng(0)
    steps = np.arange(80)
    series = [
        pd.DataFrame({"unique_id": f"s{n}", "ds": steps, "y": 3 + np.sin(steps / 5 + n) + rng.normal(0, 0.1, 80)})
        for n in range(8)
    ]
    sizes = {"mlp_units": 3 * [[16, 16]], "batch_size": 4, "windows_batch_size": 32}
    model = NHITS(h=6, input_size=24, max_steps=10, random_seed=1, **sizes, **DISTRIBUTION, **QUIET)
    forecast = NeuralForecast(models=[model], freq=1)
    forecast.fit(pd.concat(series, ignore_index=True))
    fitted = forecast.models[0]
    weights, loss = sums(fitted), float(fitted.metrics["train_loss"])
    predictions = forecast.predict()["NHITS"].to_numpy(float).reshape(8, 6)
    show(weights=weights, loss=loss, predictions=predictions.tolist())
