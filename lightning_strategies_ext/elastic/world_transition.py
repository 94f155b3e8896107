"""Transition from one world to the next: a process gets its new rank and joins the other ranks, or leaves the job.

The new ranks are assigned by the membership service: ``horovodrun``'s elastic driver, or the main process that has
started the workers. A rank that waits for it longer than :data:`SAVE_AFTER_S` saves its commit as a checkpoint, because
the service may end the job.
"""

import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.elastic.commit import Commit
from lightning_strategies_ext.elastic.membership import (
    SIGTERM_EXIT_CODE,
    Member,
    Membership,
    MembershipListener,
    MembershipServiceError,
)
from lightning_strategies_ext.exceptions import TooFewRanksError

log = logging.getLogger(__name__)

#: Time for which a rank waits for its rank in the next world before it saves a checkpoint, in seconds. The membership
#: service assigns ranks immediately if there are enough of them.
SAVE_AFTER_S = 5.0
#: Interval of the checks whether another rank has saved a checkpoint, in seconds.
_POLL_S = 0.05
#: Time for which a rank that gets a SIGTERM still waits for its rank in the next world, in seconds. The membership
#: service replies immediately that the rank is not needed any more, unless it has ended the job.
SIGTERM_REPLY_TIMEOUT_S = 0.5


class RankChangingStrategy(Protocol):
    """Interface of a strategy whose process may get another rank, or leave the job."""

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Plugin that writes checkpoints."""

    def apply_rank(self) -> None:
        """Applies the rank that the membership has assigned to this process."""

    def detach(self) -> None:
        """Closes the connections to the other ranks, so that this rank can exit while they continue."""


@dataclass
class LeaveRequest:
    """Request that this rank leaves the job while the other ranks continue.

    Attributes:
        requested_at: Time of the first request, on the monotonic clock; None without a request.
        error: Exception that ``fit`` raises when the rank leaves.
    """

    requested_at: float | None = None
    error: BaseException = field(default_factory=lambda: SIGTERMException(SIGTERM_EXIT_CODE))

    @property
    def is_set(self) -> bool:
        """Whether there is a request."""
        return self.requested_at is not None

    @property
    def is_of_sigterm(self) -> bool:
        """Whether there is a request after a SIGTERM."""
        return self.is_set and isinstance(self.error, SIGTERMException)

    def is_older_than(self, seconds: float) -> bool:
        """Whether there is a request, and more than the given time has passed since."""
        return self.requested_at is not None and time.monotonic() - self.requested_at > seconds

    def set(self, error: BaseException | None) -> None:
        """Requests that this rank leaves; for a signal handler.

        Args:
            error: Exception that ``fit`` raises; None for the exception of the last request, or a SIGTERMException.
        """
        if error is not None:
            self.error = error
        if self.requested_at is None:
            self.requested_at = time.monotonic()


class WorldTransition:
    """Takes this rank from one world to the next, or out of the job.

    Args:
        strategy: The strategy.
        trainer: The Trainer, in ``fit``.
        membership: Membership of this process.
        listener: Listener of the membership.
        commit: Commit of this rank.
        leave_request: Request that this rank leaves the job.
        fit_number: Number of this ``fit`` in this process.
    """

    def __init__(
        self,
        strategy: RankChangingStrategy,
        trainer: "pl.Trainer",
        membership: Membership,
        listener: MembershipListener,
        commit: Commit,
        leave_request: LeaveRequest,
        fit_number: int,
    ) -> None:
        self._strategy = strategy
        self._trainer = trainer
        self._membership = membership
        self._listener = listener
        self._commit = commit
        self._leave_request = leave_request
        self._fit_number = fit_number
        self._checkpoint: Path | None = None  # checkpoint of the commit, once it is saved
        self._found_file: tuple[int, ...] | None = None  # the file in its place before this rank waited

    def join_next_world(self) -> None:
        """Waits until all ranks of the next world have joined it.

        Raises:
            SystemExit: If this process is not needed any more.
            TooFewRanksError: If the membership service does not respond, or this rank received a SIGTERM when the job
                was about to end.
        """
        steps_done = self._trainer.global_step
        self._found_file = _identity_of_file(self._checkpoint_path)
        while True:
            # A host or worker that joins after this point may have to wait for the world after the next.
            self._listener.has_changed = False
            try:
                rank = self._membership.next_rank(self._on_wait_for_rank)
                if rank is None:
                    self._strategy.detach()
                    log.warning("This rank exits: %s.", self._membership.no_rank_reason)
                    raise SystemExit(0)
                has_joined_all = self._membership.rendezvous(self._member(rank, steps_done), self._on_wait_for_ranks)
            except MembershipServiceError as error:
                raise TooFewRanksError(f"{error}. {self._checkpoint_message()}") from error
            if has_joined_all:
                break
            log.warning("Rank %d: a new rank did not join. Requesting another world.", rank)
        self._strategy.apply_rank()
        self._checkpoint = None

    def leave_job(self) -> NoReturn:
        """Ends this rank with the exception of the leave request, while the other ranks continue."""
        self._strategy.detach()
        self._leave_request.requested_at = None
        if isinstance(self._leave_request.error, SIGTERMException):
            log.warning("This rank leaves the world after a SIGTERM.")
        raise self._leave_request.error

    def _member(self, rank: int, steps_done: int) -> Member:
        return Member(
            Peer.this_process(rank),
            fit_number=self._fit_number if self._membership.has_joined else 0,  # 0 marks a new rank
            committed_batches=self._commit.batches,
            committed_step=self._commit.step,
            steps_done=steps_done,
        )

    def _on_wait_for_rank(self, waited_s: float) -> None:
        if self._checkpoint is None and self._commit.shared is not None and self._must_save(waited_s):
            log.warning(
                "This rank has waited %.0f s for its rank in the next world: %s %s",
                waited_s,
                self._membership.waiting_reason,
                self._checkpoint_message(),
            )
        if self._leave_request.is_older_than(SIGTERM_REPLY_TIMEOUT_S):
            self._leave_while_waiting()

    def _on_wait_for_ranks(self, waited_s: float) -> None:
        if self._leave_request.is_set:
            self._leave_while_waiting()

    def _leave_while_waiting(self) -> NoReturn:
        if self._membership.sigterm_consequence is None:
            self.leave_job()
        raise TooFewRanksError(
            f"This rank received a SIGTERM before it joined a new world: {self._membership.sigterm_consequence}."
            f" {self._checkpoint_message()}"
        )

    # --- checkpoint of the commit ---

    def _must_save(self, waited_s: float) -> bool:
        """Returns whether the commit is to be saved now, or has been saved by another rank.

        The lowest running rank of each host saves the commit. The other ranks save it only if that rank has not done so
        after the same time again: it may be in a validation, or stopped.
        """
        if waited_s <= SAVE_AFTER_S:
            return False
        return self._is_lowest_on_host or waited_s > 2 * SAVE_AFTER_S or self._was_saved_by_peer

    @property
    def _is_lowest_on_host(self) -> bool:
        """Whether this rank is the lowest running rank of its host."""
        host = Peer.this_process(0).host
        local_peers = [member.peer for member in self._membership.members if member.peer.host == host]
        return next((peer.pid for peer in local_peers if peer.is_running()), None) in (None, os.getpid())

    def _checkpoint_message(self) -> str:
        """Saves the commit, unless saved already, and returns a text that explains how to continue from it."""
        if self._commit.shared is None:
            return "It had no state to save yet."
        if self._checkpoint is None:
            end = time.monotonic() + SAVE_AFTER_S
            while not (self._is_lowest_on_host or self._was_saved_by_peer) and time.monotonic() < end:
                time.sleep(_POLL_S)  # the job may end for all ranks, of which one saves the commit
            if not self._was_saved_by_peer:
                self._strategy.checkpoint_io.save_checkpoint(self._commit.build_checkpoint(), self._checkpoint_path)
            self._checkpoint = self._checkpoint_path
        return (
            f"The state at step {self._commit.step} is saved in {self._checkpoint}. Continue with `trainer.fit(...,"
            f" ckpt_path='{self._checkpoint}')`."
        )

    @property
    def _was_saved_by_peer(self) -> bool:
        """Whether another rank has written the checkpoint while this rank waited."""
        return _identity_of_file(self._checkpoint_path) not in (None, self._found_file)

    @property
    def _checkpoint_path(self) -> Path:
        return Path(self._trainer.default_root_dir, f"elastic-step={self._commit.step}.ckpt").absolute()


def _identity_of_file(path: Path) -> tuple[int, ...] | None:
    """Returns numbers that change when the file is written again; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
