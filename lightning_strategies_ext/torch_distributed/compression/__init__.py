"""Compression: what ranks exchange in place of whole gradients if the network is the bottleneck.

:mod:`.options` has the classes for users. :mod:`.exchange` has the interface for strategies. :mod:`.gradients`
implements it with a ``Codec`` that compresses gradients, :mod:`.models` with an exchange of models instead.
:mod:`.levels` has the process groups. No module here imports Lightning.
"""
