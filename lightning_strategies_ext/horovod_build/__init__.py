"""Builds the released Horovod for the torch at hand: ``python -m lightning_strategies_ext install-horovod``.

Horovod 0.28.1 is the last release, and it is a source distribution that does not compile against torch 2.1 and later.
The command fetches that release, changes the few lines that are in the way, builds a wheel, keeps it, installs it and
proves with two processes that it reduces. Read :mod:`.command` first; it calls, in this order:

- :mod:`.requirements`: what must be there before anything is fetched, and what of it is not;
- :mod:`.key`: for which torch, Python, platform and options a wheel is good;
- :mod:`.cache`: wheels of earlier builds;
- :mod:`.source`: the released source and the packages that its build imports, checked and unpacked;
- :mod:`.fixes`: what is changed in it, and why;
- :mod:`.wheel`: the build itself, with its progress and its log;
- :mod:`.proof`: the all-reduce that shows that it works.

:mod:`.installed` says without importing Horovod why it cannot be used here. Nothing in this package imports torch,
Lightning or Horovod, except the ranks of the proof, which are processes of their own.
"""
