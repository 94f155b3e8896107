"""Account of every method of this package that overrides or replaces a method of Lightning.

``accounts/*.md`` contain the account: for each line of Lightning's method, the replacement in this package, or the
reason why the line is not needed. ``hashes.json`` contains a hash of each such method in every release of Lightning. To
add a release, download its wheel (``pip download --no-deps lightning==X``) and run::

    python -m tests.overrides --write lightning-X-py3-none-any.whl ...
    python -m tests.overrides --write           # the installed release
    python -m tests.overrides --check lightning-X-py3-none-any.whl ...
    python -m tests.overrides --skeleton        # rows for overrides without an entry, to be completed by hand
"""
