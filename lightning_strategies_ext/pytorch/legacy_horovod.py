"""The name ``horovod``, which Lightning 2 dropped."""

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_strategies_ext.pytorch.horovod import HorovodStrategy


def legacy_horovod(**kwargs: Any) -> HorovodStrategy:
    """Creates the strategy for ``Trainer(strategy="horovod")``, a name that Lightning 2 does not have."""
    strategy = HorovodStrategy(**kwargs)  # sets the rank, on which the message depends
    rank_zero_info(
        "`strategy='horovod'` is provided by lightning-strategies-ext, and is the same as `strategy='horovod_ext'`."
    )
    return strategy
