"""What torch calls at the end of ``import torch``; installed as the module ``lightning_strategies_ext_autoload``.

It stands beside the package and imports nothing of it before it is called, so that ``import torch`` works also where
the package has gone: the checkout of an editable install was moved or deleted, and what pip knows of it is still there.
"""

import sys


def install() -> None:
    """Calls :func:`lightning_strategies_ext.discovery.install`. Never raises."""
    try:
        from lightning_strategies_ext.discovery import install as install_
    except Exception as error:
        print(  # noqa: T201
            f"lightning-strategies-ext: its strategies are not there, since it cannot be imported"
            f" ({type(error).__name__}: {error}). If it was installed from a checkout that was moved, install it anew;"
            " else `pip uninstall lightning-strategies-ext`.",
            file=sys.stderr,
        )
    else:
        install_()
