"""Script of plain torch in :mod:`benchmarks.rank_loss`: steps with DDP and nothing else. No rank is killed."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.rank_loss_training import BATCH_SIZE, LEARNING_RATE, Job, Numbered, StepLog


def main() -> None:
    """Trains as many steps as the other contenders train before the kill."""
    job = Job.this_process()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # gradient_as_bucket_view as in the strategies of this package, so that the loop is a fair reference.
    model = DistributedDataParallel(job.net(), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    samples = Numbered(job.num_samples)
    step_log = StepLog(replace(job, killed_rank=-1))
    data = DataLoader(samples, BATCH_SIZE, sampler=DistributedSampler(samples))
    for number, (indices, rows) in zip(range(1, job.kill_at + 1), data, strict=False):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        step_log.step(number, rank, world_size, indices)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
