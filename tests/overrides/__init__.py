"""Account of every method of this package that overrides or replaces a method of Lightning.

``accounts/*.md`` hold the account: for each line of Lightning's method, what does the same here, or why it is not
needed. ``hashes.json`` holds a hash of each such method in every release of Lightning. To add a release, download its
wheel (``pip download --no-deps lightning==X``) and run::

    python -m tests.overrides --write lightning-X-py3-none-any.whl ...
    python -m tests.overrides --write           # the installed release
    python -m tests.overrides --check lightning-X-py3-none-any.whl ...
    python -m tests.overrides --skeleton        # rows for overrides that have none, to be completed by hand
"""
