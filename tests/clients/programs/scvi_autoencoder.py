"""scvi-tools: the SCVI model on synthetic cells, with a Trainer that the library creates; latent representation."""

import scvi

from tests.clients.programs.common import DISTRIBUTION, STRATEGY, is_first, show, sums

scvi.settings.seed = 1  # at module level, also for spawned workers, in which the library splits the cells

if __name__ == "__main__":
    cells = scvi.data.synthetic_iid(batch_size=100, n_genes=30)
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
    model = scvi.model.SCVI(cells, n_hidden=16, n_latent=4)
    strategy = f"{STRATEGY}_find_unused_parameters_true" if "ddp" in STRATEGY else STRATEGY
    tails = {"drop_dataset_tail": True, "drop_last": False} if "ddp" in STRATEGY else {}
    model.train(
        max_epochs=2,
        batch_size=32,
        early_stopping=False,
        datasplitter_kwargs=tails,
        **{**DISTRIBUTION, "strategy": strategy},
    )
    elbo = model.history["elbo_train"].iloc[:, 0].astype(float).tolist() if is_first() else []  # rank 0 has the result
    latent = model.get_latent_representation(give_mean=True)
    show(weights=sums(model.module), elbo=elbo, latent=latent.astype(float).sum(axis=0).tolist())
