"""What the user may set of a ``shm`` process group."""

from dataclasses import dataclass

from lightning_strategies_ext.shm.segments import chosen_num_bytes


@dataclass
class ShmOptions:
    """What ``torch.distributed.init_process_group("shm", pg_options=...)`` takes.

    Attributes:
        segment_num_bytes: Shared memory that each rank takes, in bytes; None takes it from the environment variable
            ``LIGHTNING_STRATEGIES_EXT_SHM_BYTES``, else 2 MiB, or 8 MiB where there are more ranks than cores.

    Raises:
        ValueError: If it is no number, or too small.
    """

    segment_num_bytes: int | None = None

    def __post_init__(self) -> None:
        chosen_num_bytes(self.segment_num_bytes)
