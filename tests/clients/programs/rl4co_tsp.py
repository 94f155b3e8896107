"""rl4co: REINFORCE on the traveling salesman problem, with an environment that customizes pickling."""

import lightning.pytorch as pl
import torch
from rl4co.envs import TSPEnv
from rl4co.models import REINFORCE, AttentionModelPolicy
from rl4co.utils import RL4COTrainer

from tests.clients.programs.common import DISTRIBUTION, QUIET, show, sums

if __name__ == "__main__":
    torch.set_num_threads(1)  # the imports ignore OMP_NUM_THREADS, and bfloat16 would round differently
    pl.seed_everything(1, verbose=False)
    env = TSPEnv(generator_params={"num_loc": 8})
    policy = AttentionModelPolicy(
        env_name=env.name, embed_dim=16, num_encoder_layers=1, num_heads=2, feedforward_hidden=16
    )
    sizes = {"batch_size": 16, "train_data_size": 64, "val_data_size": 32, "test_data_size": 32}
    model = REINFORCE(env, policy, baseline="exponential", **sizes)
    trainer = RL4COTrainer(max_epochs=2, **DISTRIBUTION, **QUIET, enable_checkpointing=False)
    trainer.fit(model)
    weights = sums(model.policy)
    tested = trainer.test(model, verbose=False)
    show(weights=weights, tested=tested, is_generator=isinstance(env.rng, torch.Generator | type(None)))
