"""darts: N-BEATS, whose Trainer the library creates from `pl_trainer_kwargs`, `fit` and `predict`."""

import numpy as np
from darts import TimeSeries
from darts.models import NBEATSModel

from tests.clients.programs.common import DISTRIBUTION, QUIET, show, sums

if __name__ == "__main__":
    steps = np.arange(120)
    series = [TimeSeries.from_values(np.sin(steps / 5 + n).astype(np.float32)) for n in range(4)]
    model = NBEATSModel(
        input_chunk_length=24,
        output_chunk_length=6,
        n_epochs=2,
        batch_size=16,
        num_stacks=2,
        num_blocks=1,
        num_layers=2,
        layer_widths=16,
        random_state=1,
        pl_trainer_kwargs={**DISTRIBUTION, **QUIET},
    )
    model.fit(series)
    weights = sums(model.model)
    forecasts = model.predict(n=6, series=series)
    show(weights=weights, predictions=[forecast.values().flatten().astype(float).tolist() for forecast in forecasts])
