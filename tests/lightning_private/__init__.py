"""What :mod:`lightning_strategies_ext._lightning` needs of Lightning, by behaviour: a new release fails here first."""
