"""Script of torchft in :mod:`benchmarks.rank_loss`: a replica group of one rank, as in torchft's own example.

    python -m benchmarks.rank_loss_torchft JOB GROUP

A restarted group begins with the first samples of its shard, as in that example: users of torchft restore the position
in the data themselves.
"""

import sys
import time
from datetime import timedelta
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

from benchmarks.rank_loss_training import BATCH_SIZE, LEARNING_RATE, NUM_RANKS, Job, Numbered, StepLog


def wait_for_others(job: Job, group: int) -> None:
    """Waits for all groups, because the first group would train alone otherwise."""
    Path(job.directory, f"ready{group}").touch()
    while len(list(Path(job.directory).glob("ready*"))) < NUM_RANKS:
        time.sleep(0.01)


def main() -> None:
    """Trains until the steps of an epoch are done and the killed group has joined again."""
    job, group = Job.this_process(), int(sys.argv[2])
    # Users start a group with torchrun.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=load_state,
        state_dict=state,
        min_replica_size=1,
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"group{group}",
        hostname="127.0.0.1",
        init_sync=False,  # weights are the same
    )
    model = DistributedDataParallel(manager, job.net())
    optimizer = Optimizer(manager, torch.optim.Adam(model.parameters(), lr=LEARNING_RATE))
    samples = Numbered(job.num_samples)
    sampler = DistributedSampler(
        samples, replica_rank=group, num_replica_groups=NUM_RANKS, group_rank=0, num_replicas=1, shuffle=True
    )
    data = DataLoader(samples, BATCH_SIZE, sampler=sampler)
    wait_for_others(job, group)
    step_log = StepLog(job)
    for indices, rows in chain.from_iterable(repeat(data)):
        done = manager.current_step()
        optimizer.zero_grad()
        loss = model(rows).square().mean()
        step_log.exit_if_due(group, done)
        loss.backward()
        counts = manager.is_participating()
        optimizer.step()
        number, world_size = manager.current_step(), manager.num_participants()
        if number > done:
            # The other group may join again after the end of the epoch. Later steps are not counted.
            step_log.step(number, group, world_size, indices if counts and number <= job.num_steps else None)
        if number >= job.num_steps and world_size == NUM_RANKS:
            break
    manager.shutdown()


if __name__ == "__main__":
    main()
