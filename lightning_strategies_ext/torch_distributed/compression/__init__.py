"""Compression: what ranks exchange in place of whole gradients if the network is the bottleneck.

:mod:`.config` has the classes for users. Two features (:mod:`..feature`) exchange: :mod:`.compressed_gradients`
compresses gradients with a ``Codec``, and :mod:`.local_sgd` averages models instead. :mod:`.host_groups` has the
process groups. No module here imports Lightning.
"""
