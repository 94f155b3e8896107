"""chemprop: a message passing network on 32 molecules, `fit`, `test`, and `predict`."""

import lightning.pytorch as pl
from chemprop import data, models, nn

from tests.clients.programs.common import DEVICES, show, sums, trainer

if __name__ == "__main__":
    pl.seed_everything(1, verbose=False)
    chains = [f"{'C' * length}{end}" for length in range(1, 9) for end in ("O", "N", "Cl", "C(=O)O")]
    points = [data.MoleculeDatapoint.from_smi(smiles, [float(len(smiles))]) for smiles in chains]
    molecules = data.MoleculeDataset(points)
    molecules.normalize_targets()
    model = models.MPNN(
        nn.BondMessagePassing(d_h=16),
        nn.MeanAggregation(),
        nn.RegressionFFN(input_dim=16, hidden_dim=16),
        metrics=[nn.metrics.RMSE()],
    )
    fitting = trainer(max_epochs=3)
    size = 8 // DEVICES
    fitting.fit(
        model,
        data.build_dataloader(molecules, size, shuffle=False),
        data.build_dataloader(molecules, size, shuffle=False),
    )
    weights, val_loss = sums(model), fitting.callback_metrics["val_loss"].item()
    tested = fitting.test(model, data.build_dataloader(molecules, size, shuffle=False), verbose=False)
    batches = fitting.predict(model, data.build_dataloader(molecules, size, shuffle=False))
    predictions = [float(value) for batch in batches for value in batch.flatten()]
    show(weights=weights, val_loss=val_loss, tested=tested, predictions=predictions)
