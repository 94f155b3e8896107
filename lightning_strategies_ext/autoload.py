"""Entry point that torch calls at the end of ``import torch``; installed as ``lightning_strategies_ext_autoload``.

This module is installed outside of the package and imports it only in the call. ``import torch`` therefore works if the
package is missing: the checkout of an editable install was moved or deleted, while its metadata remains.
"""

import sys


def install() -> None:
    """Calls :func:`lightning_strategies_ext.discovery.install`. Never raises."""
    try:
        from lightning_strategies_ext.discovery import install as install_
    except Exception as error:
        print(  # noqa: T201
            "lightning-strategies-ext: the package could not be imported, so its strategies are unavailable"
            f" ({type(error).__name__}: {error}). Reinstall it if its checkout was moved, or run `pip uninstall"
            " lightning-strategies-ext`.",
            file=sys.stderr,
        )
    else:
        install_()
