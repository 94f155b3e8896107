"""What ranks exchange in place of whole gradients, where the network is the limit.

:mod:`.options` are what users write. :mod:`.exchange` is what a strategy asks while it trains: of :mod:`.gradients`,
which a ``Codec`` makes smaller, or of :mod:`.models`, which are exchanged instead. :mod:`.levels` are the groups that
do it. Nothing here imports Lightning.
"""
