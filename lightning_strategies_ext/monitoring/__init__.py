"""Communication monitor: records when steps and exchanges begin and end on each rank, and analyzes the times.

The callback is :class:`lightning_strategies_ext.pytorch.communication_monitor.CommunicationMonitor`; this package is
independent of Lightning. A ``step_recorder`` records times on each rank (``records``) and sends them to rank 0 in the
background (``mailbox``), where ``analysis`` computes means, ``advice`` derives a recommendation, and ``trace`` and
``plot`` create a timeline.

Limitations: between hosts, clocks agree only to within the duration of a collective. A rank with a slow network cannot
be distinguished from other ranks, because all ranks wait equally long.
"""
