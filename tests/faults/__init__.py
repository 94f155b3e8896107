"""Fault injection: after a fault on one rank, all ranks exit soon, and a message names the cause. See :mod:`.cases`."""
