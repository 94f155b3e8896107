"""Every private name of Lightning that this package uses, each in its own function or alias.

Each states its purpose and the Lightning versions in which it was checked. ``tests/lightning_private`` fails if a name
is missing, so that an incompatible Lightning release fails there first.
"""
