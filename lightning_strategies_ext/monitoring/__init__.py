"""What ranks learn about their own exchanges: when steps and exchanges begin and end, and what follows from it.

The face is :class:`lightning_strategies_ext.pytorch.monitor.CommunicationMonitor`; nothing here knows Lightning. A
``session`` notes times on each rank (``records``) and sends them to rank 0 beside the training (``mailbox``), where
``analysis`` makes means of them, ``advice`` a sentence, and ``trace`` and ``picture`` a timeline.

What it does not promise: clocks that agree to less than the time a collective takes, between hosts; and that a rank
whose network is slow is told from others, since all wait for it alike.
"""
