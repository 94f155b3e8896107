"""Program of each rank in the smoke test."""

import os
import sys


def main() -> int:
    """Sums ``rank + 1`` over all ranks.

    Returns:
        Exit code, 0 if the sum is correct.
    """
    import horovod.torch as hvd
    import torch

    hvd.init()
    total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum)
    expected = hvd.size() * (hvd.size() + 1) / 2
    # A single write, because the ranks share the launcher's output, and print() may write the newline separately.
    os.write(1, f"rank {hvd.rank()} of {hvd.size()}: the sum is {total.item():g}\n".encode())
    hvd.shutdown()
    return 0 if total.item() == expected else 1


if __name__ == "__main__":
    sys.exit(main())
