"""The engine torch.distributed: process group, gradient exchange through DDP, and collectives."""
