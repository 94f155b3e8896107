"""Distributed strategies for PyTorch Lightning, registered by name.

After the installation, ``Trainer(strategy="ddp_ext")`` and ``Fabric(strategy="ddp_ext")`` work without an import of
this package, see :mod:`lightning_strategies_ext.discovery`. Import it to construct a strategy with arguments::

    from lightning_strategies_ext import DDPStrategy

    trainer = Trainer(strategy=DDPStrategy(static_graph=True), devices=2)

This module runs at every ``import torch``, so its imports are cheap. Classes are imported at their first use.
"""

from typing import TYPE_CHECKING

from lightning_strategies_ext import discovery
from lightning_strategies_ext.discovery import lazy_names

if TYPE_CHECKING:
    from lightning_strategies_ext.checks import ChecksOptions as ChecksOptions
    from lightning_strategies_ext.elastic.policy import KeepGlobalBatch as KeepGlobalBatch
    from lightning_strategies_ext.elastic.policy import ScaleLearningRate as ScaleLearningRate
    from lightning_strategies_ext.elastic.policy import WorldSizePolicy as WorldSizePolicy
    from lightning_strategies_ext.elastic.policy import scale_learning_rates as scale_learning_rates
    from lightning_strategies_ext.exceptions import LoggedKeysError as LoggedKeysError
    from lightning_strategies_ext.exceptions import ModelMismatchError as ModelMismatchError
    from lightning_strategies_ext.exceptions import NonfiniteLossError as NonfiniteLossError
    from lightning_strategies_ext.exceptions import RankDisagreementError as RankDisagreementError
    from lightning_strategies_ext.exceptions import RankFailedError as RankFailedError
    from lightning_strategies_ext.exceptions import ResultTransferError as ResultTransferError
    from lightning_strategies_ext.exceptions import TooFewRanksError as TooFewRanksError
    from lightning_strategies_ext.exceptions import UnevenInputsError as UnevenInputsError
    from lightning_strategies_ext.exceptions import WorkerDiedError as WorkerDiedError
    from lightning_strategies_ext.exceptions import WorkerRaisedError as WorkerRaisedError
    from lightning_strategies_ext.pytorch.communication_monitor import CommunicationMonitor as CommunicationMonitor
    from lightning_strategies_ext.pytorch.ddp import DDPStrategy as DDPStrategy
    from lightning_strategies_ext.pytorch.ddp_elastic import DDPElasticStrategy as DDPElasticStrategy
    from lightning_strategies_ext.pytorch.ddp_ray import DDPRayStrategy as DDPRayStrategy
    from lightning_strategies_ext.pytorch.ddp_ray_elastic import DDPRayElasticStrategy as DDPRayElasticStrategy
    from lightning_strategies_ext.pytorch.ddp_spawn import DDPSpawnPlugin as DDPSpawnPlugin
    from lightning_strategies_ext.pytorch.ddp_spawn import DDPSpawnStrategy as DDPSpawnStrategy
    from lightning_strategies_ext.pytorch.ddp_spawn_elastic import DDPSpawnElasticStrategy as DDPSpawnElasticStrategy
    from lightning_strategies_ext.pytorch.dp import DataParallelStrategy as DataParallelStrategy
    from lightning_strategies_ext.pytorch.horovod import HorovodStrategy as HorovodStrategy
    from lightning_strategies_ext.pytorch.horovod_elastic import HorovodElasticStrategy as HorovodElasticStrategy
    from lightning_strategies_ext.pytorch.parallel import ParallelStrategy as ParallelStrategy
    from lightning_strategies_ext.shm.options import ShmOptions as ShmOptions
    from lightning_strategies_ext.torch_distributed.compression.config import BFloat16 as BFloat16
    from lightning_strategies_ext.torch_distributed.compression.config import Compression as Compression
    from lightning_strategies_ext.torch_distributed.compression.config import DiLoCo as DiLoCo
    from lightning_strategies_ext.torch_distributed.compression.config import Float16 as Float16
    from lightning_strategies_ext.torch_distributed.compression.config import LocalSGD as LocalSGD
    from lightning_strategies_ext.torch_distributed.compression.config import PowerSGD as PowerSGD
    from lightning_strategies_ext.torch_distributed.compression.config import TopK as TopK

__version__ = "0.2.0"

_EXPORTS = {
    "ParallelStrategy": "lightning_strategies_ext.pytorch.parallel",
    "DDPStrategy": "lightning_strategies_ext.pytorch.ddp",
    "DDPRayStrategy": "lightning_strategies_ext.pytorch.ddp_ray",
    "DDPRayElasticStrategy": "lightning_strategies_ext.pytorch.ddp_ray_elastic",
    "DDPSpawnStrategy": "lightning_strategies_ext.pytorch.ddp_spawn",
    "DDPElasticStrategy": "lightning_strategies_ext.pytorch.ddp_elastic",
    "DDPSpawnElasticStrategy": "lightning_strategies_ext.pytorch.ddp_spawn_elastic",
    "DDPSpawnPlugin": "lightning_strategies_ext.pytorch.ddp_spawn",
    "DataParallelStrategy": "lightning_strategies_ext.pytorch.dp",
    "HorovodElasticStrategy": "lightning_strategies_ext.pytorch.horovod_elastic",
    "HorovodStrategy": "lightning_strategies_ext.pytorch.horovod",
    "BFloat16": "lightning_strategies_ext.torch_distributed.compression.config",
    "Compression": "lightning_strategies_ext.torch_distributed.compression.config",
    "DiLoCo": "lightning_strategies_ext.torch_distributed.compression.config",
    "Float16": "lightning_strategies_ext.torch_distributed.compression.config",
    "LocalSGD": "lightning_strategies_ext.torch_distributed.compression.config",
    "PowerSGD": "lightning_strategies_ext.torch_distributed.compression.config",
    "TopK": "lightning_strategies_ext.torch_distributed.compression.config",
    "ChecksOptions": "lightning_strategies_ext.checks",
    "CommunicationMonitor": "lightning_strategies_ext.pytorch.communication_monitor",
    "KeepGlobalBatch": "lightning_strategies_ext.elastic.policy",
    "LoggedKeysError": "lightning_strategies_ext.exceptions",
    "ModelMismatchError": "lightning_strategies_ext.exceptions",
    "NonfiniteLossError": "lightning_strategies_ext.exceptions",
    "RankDisagreementError": "lightning_strategies_ext.exceptions",
    "RankFailedError": "lightning_strategies_ext.exceptions",
    "ResultTransferError": "lightning_strategies_ext.exceptions",
    "ScaleLearningRate": "lightning_strategies_ext.elastic.policy",
    "ShmOptions": "lightning_strategies_ext.shm.options",
    "UnevenInputsError": "lightning_strategies_ext.exceptions",
    "WorkerDiedError": "lightning_strategies_ext.exceptions",
    "WorkerRaisedError": "lightning_strategies_ext.exceptions",
    "WorldSizePolicy": "lightning_strategies_ext.elastic.policy",
    "TooFewRanksError": "lightning_strategies_ext.exceptions",
    "scale_learning_rates": "lightning_strategies_ext.elastic.policy",
}

_RENAMED = {
    "DifferentModelsError": "ModelMismatchError",
    "ResultsError": "ResultTransferError",
    "WorldTooSmallError": "TooFewRanksError",
}

__all__ = [*_EXPORTS, "__version__"]
__getattr__, __dir__ = lazy_names(__name__, _EXPORTS, ("__version__",), _RENAMED)

# An explicit import registers the names if torch's autoload is disabled; otherwise the call is a no-op.
discovery.install()
