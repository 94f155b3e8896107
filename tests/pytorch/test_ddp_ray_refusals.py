"""Arguments that ``ddp_ray_ext`` refuses at construction."""

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_strategies_ext import DDPRayStrategy
from tests.support.ray_clusters import needs_ray

pytestmark = needs_ray


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_workers": 0}, ValueError, "num_workers=0"),
        ({"num_workers": 2.5}, TypeError, "num_workers"),
        ({"num_cpus_per_worker": 0}, ValueError, "requires CPU time"),
        ({"num_cpus_per_worker": 1.5}, ValueError, "fractions only below 1"),
        ({"num_gpus_per_worker": -1}, ValueError, "negative"),
        ({"num_gpus_per_worker": 2}, ValueError, "one GPU"),
        ({"resources_per_worker": {"CPU": 2}}, ValueError, "num_cpus_per_worker"),
        ({"resources_per_worker": 3}, TypeError, "resources_per_worker"),
        ({"placement_strategy": "pack"}, ValueError, "'PACK'"),
        ({"address": 6379}, TypeError, "address"),
        ({"runtime_env": "."}, TypeError, "runtime_env"),
        ({"environment_variables": "HF_TOKEN"}, TypeError, "environment_variables"),
        ({"environment_variables": ["HF_TOKEN=1"]}, ValueError, "HF_TOKEN=1.*env_vars"),
        ({"environment_variables": ["RAY_AUTH_TOKEN"]}, ValueError, "RAY_AUTH_TOKEN.*never sent"),
        ({"environment_variables": ["PATH"]}, ValueError, "PATH.*never sent"),
        ({"elastic": "yes"}, TypeError, "elastic"),
        ({"start_method": "fork"}, ValueError, "Ray starts"),
        ({"max_restarts": 3}, ValueError, "max_restarts=3` requires `elastic=True"),
        ({"cluster_environment": LightningEnvironment()}, ValueError, "cluster_environment"),
        ({"no_such_argument": 1}, TypeError, "no_such_argument"),
    ],
)
def test_invalid_arguments_are_refused_at_construction(arguments, error, message):
    with pytest.raises(error, match=message):
        DDPRayStrategy(**arguments)
