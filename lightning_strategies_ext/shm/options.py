"""Options of a ``shm`` process group."""

from dataclasses import dataclass

from lightning_strategies_ext.shm.segments import resolve_num_bytes


@dataclass
class ShmOptions:
    """Options for ``torch.distributed.init_process_group("shm", pg_options=...)``.

    Attributes:
        segment_num_bytes: Size of each rank's shared memory, in bytes. If None, the environment variable
            ``LIGHTNING_STRATEGIES_EXT_SHM_SEGMENT_BYTES`` sets it; the default is 2 MiB, or 8 MiB if there are more
            ranks than cores.

    Raises:
        ValueError: If the size is not a number, or too small.
    """

    segment_num_bytes: int | None = None

    def __post_init__(self) -> None:
        resolve_num_bytes(self.segment_num_bytes)
