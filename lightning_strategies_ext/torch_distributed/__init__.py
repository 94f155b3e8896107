"""One engine: torch.distributed, its process group, gradients through DDP, its collectives."""
