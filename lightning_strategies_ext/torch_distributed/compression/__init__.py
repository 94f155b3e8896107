"""Compression: what ranks exchange in place of whole gradients if the network is the bottleneck.

:mod:`.config` has the classes for users. :mod:`.compressed_exchange` has the interface for strategies.
:mod:`.compressed_gradients` implements it with a ``Codec`` that compresses gradients, :mod:`.local_sgd` with an
exchange of models instead. :mod:`.host_groups` has the process groups. No module here imports Lightning.
"""
