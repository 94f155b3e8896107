"""The programs, with the libraries that they use, the strategies that they run with, and the expected results."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """A program of ``tests/clients/programs``.

    Attributes:
        packages: Distributions whose versions the table shows.
        notes: Notes for users of the library; the last cell of the row.
        ext: Strategies of this package. ``dp_ext`` is compared with one device, other strategies with ``stock``.
        stock: Lightning's strategy.
        exceptions: By strategy, a part of the expected error, or the reason for different results.
        left_out: Results that are not compared.
        arguments: Arguments of the program's command line.
    """

    packages: tuple[str, ...]
    notes: str = ""
    ext: tuple[str, ...] = ("ddp_ext", "ddp_spawn_ext", "dp_ext")
    stock: str = "ddp"
    exceptions: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    @property
    def strategies(self) -> list[str]:
        """All strategies with which the program runs."""
        one_device = ["auto"] if "dp_ext" in self.ext else []
        return [self.stock, *one_device, *self.ext]

    def reference(self, strategy: str) -> str:
        """Returns the strategy that ``strategy`` is compared with."""
        return "auto" if strategy == "dp_ext" else self.stock


CASES = {
    "chemprop_molecules": Case(
        ("chemprop",), "A batch is one graph: `dp_ext` needs `scatter=`.", exceptions={"dp_ext": "cannot be split"}
    ),
    "command_line": Case(("jsonargparse",), "With `lightning.pytorch` and with `pytorch_lightning`."),
    "darts_nbeats": Case(
        ("u8darts",),
        "Imports `pytorch_lightning`. Installed without its extra `torch`, which requires an older Lightning. Its "
        "`predict_step` has the series in the second dimension. Weights are the same.",
        exceptions={
            "ddp_spawn_ext": "forecasts are ordered by rank, not by series",
            "dp_ext": "forecasts are concatenated in the first dimension, which darts interprets as samples",
        },
    ),
    "finetuning": Case(
        ("finetuning-scheduler",),
        "Needs `FinetuningScheduler(allow_untested=True)`. Weights are not compared, because Lightning's `ddp` does "
        "not exchange gradients of unfrozen parameters.",
        left_out=("weights",),
    ),
    "forecasting": Case(("pytorch-forecasting",)),
    "geometric": Case(
        ("torch-geometric",),
        "A batch is one graph: `dp_ext` needs `scatter=`.",
        exceptions={"dp_ext": "cannot be split"},
    ),
    "gluonts_deepar": Case(
        ("gluonts",),
        "Reads a stream: each rank draws its own samples. Use `ddp_fork_ext` for workers: the stream is a "
        "generator, which cannot be pickled for spawned workers.",
        ext=("ddp_ext", "ddp_spawn_ext", "ddp_fork_ext"),
        exceptions={"ddp_spawn_ext": "cannot pickle 'generator' object"},
    ),
    "hydra_sweep": Case(("hydra-core",), arguments=("--multirun", "+lr=0.05,0.1")),
    "loggers": Case(("tensorboard",)),
    "metric_learning": Case(("pytorch-metric-learning",), ext=("ddp_ext", "ddp_spawn_ext")),
    "mlflow_autolog": Case(("mlflow",)),
    "neuralforecast_nhits": Case(
        ("neuralforecast",),
        "Imports `pytorch_lightning`. With `ddp` and `ddp_ext`, `predict` returns the forecasts of rank 0, and "
        "NaN for other series; `ddp_spawn_ext` returns all forecasts.",
        exceptions={"dp_ext": "the step of each replica draws random windows"},
    ),
    "notebook": Case(
        ("nbclient", "ipykernel"), stock="ddp_notebook", ext=("ddp_notebook_ext", "ddp_spawn_ext", "dp_ext")
    ),
    "optuna_search": Case(
        ("optuna", "optuna-integration"),
        "With `ddp` and `ddp_ext`, each rank would run the search.",
        stock="ddp_spawn",
        ext=("ddp_spawn_ext", "ddp_fork_ext", "dp_ext"),
    ),
    "rl4co_tsp": Case(
        ("rl4co",),
        "Draws its instances at the start of each stage. For equal results of `ddp_spawn_ext` and `ddp`, call "
        "`seed_everything` before `test`, too.",
        ext=("ddp_ext", "ddp_spawn_ext"),
        exceptions={"ddp_spawn_ext": "workers continue the random numbers of `fit`; `ddp` resets the seed"},
    ),
    "scvi_autoencoder": Case(
        ("scvi-tools",),
        "Use the names with `_find_unused_parameters_true`, as in its documentation. With `ddp_spawn_ext`, set "
        "`scvi.settings.seed` at the top of the script, which workers import, because workers split the cells.",
        exceptions={"dp_ext": "is given a number by each replica"},
    ),
    "stateful_loader": Case(("torchdata",)),
    "tabular_category": Case(
        ("pytorch-tabular",),
        "Imports `pytorch_lightning`.",
        exceptions={"dp_ext": "batch normalization uses the part of the batch of each replica"},
    ),
    "transformers_bert": Case(("transformers", "datasets")),
}
