"""What one rank of the proof runs; a program of its own that two processes are started with."""

import os
import sys


def main() -> int:
    """Adds the numbers of the ranks, counted from one, over all ranks."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum)
    expected = hvd.size() * (hvd.size() + 1) / 2
    # One write: two ranks share the launcher's output, and print() can write the end of the line on its own.
    os.write(1, f"rank {hvd.rank()} of {hvd.size()}: the sum is {total.item():g}\n".encode())
    hvd.shutdown()
    return 0 if total.item() == expected else 1


if __name__ == "__main__":
    sys.exit(main())
