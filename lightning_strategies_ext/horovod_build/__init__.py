"""Builds the released Horovod for the installed torch: ``python -m lightning_strategies_ext install-horovod``.

Horovod 0.28.1, the last release, is a source distribution that does not compile against torch 2.1 and later. The
command downloads this release, patches it, builds a wheel, caches and installs the wheel, and runs a smoke test of two
processes. Read :mod:`.command` first; it calls, in this order:

- :mod:`.requirements`: requirements of a build, and missing requirements;
- :mod:`.build_key`: key of a wheel: torch, Python, platform, and options;
- :mod:`.cache`: cache of wheels from earlier builds;
- :mod:`.source`: download and verification of the released source, and of packages that the build imports;
- :mod:`.patches`: patches of the source, with their reasons;
- :mod:`.wheel`: build of the wheel, with progress and a log;
- :mod:`.smoke_test`: smoke test with an all-reduce.

:mod:`.installed` checks the installed Horovod without importing it. This package does not import torch, Lightning, or
Horovod, except in the ranks of the smoke test, which are separate processes.
"""
