"""Every private name of Lightning's that this package touches, one named function or alias each.

Each says why it is needed and in which Lightning versions it was read. ``tests/lightning_private`` fails when one of
them is gone, so that a new Lightning release shows there first and nowhere else.
"""
