"""The world that this process is in: which ranks there are, and whether it takes part in what they do."""

from dataclasses import dataclass

from lightning_strategies_ext.failure.reconciliation import Peer
from lightning_strategies_ext.horovod.runtime import HorovodEnvironment


@dataclass
class World:
    """A world, of which there is one after another.

    Attributes:
        members: Its ranks.
        is_entered: Whether this rank takes part in collectives. One that joins does not before its ``fit`` has come as
            far as that of the others.
    """

    members: list[driver.Member]
    is_entered: bool


_world: World | None = None


def join(environment: HorovodEnvironment) -> World:
    """Joins the ranks that the driver has started this process for; the same world again when called again.

    Raises:
        RuntimeError: If some do not come.
    """
    global _world
    if _world is None:
        rank = environment.global_rank()
        members = driver.meet(environment.launch, driver.Member(Peer.this_process(rank)), lambda waited_s: None)
        if members is None:
            raise RuntimeError(
                f"Rank {rank}: not all {environment.world_size()} ranks have come in {driver.JOIN_TIMEOUT_S:.0f} s. Let"
                " the script do less before `fit`, or look at the output of the others for why they ended."
            )
        driver.initialise()
        _world = World(members, is_entered=all(member.is_new for member in members))
    return _world


def current() -> World:
    """The world that this process has joined."""
    assert _world is not None
    return _world
