"""CommunicationMonitor: a callback that reports what a step waits for, on which rank, and how to improve it.

It calls no collective, registers no communication hook, and changes no gradient. Weights are bitwise identical with and
without it. Each rank measures times, and a thread transfers them to rank 0 through the ranks' store. After an error in
the monitor, it logs one warning, and training continues without it.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import DeepSpeedStrategy, XLAStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_strategies_ext._lightning import trainer_logging, trainer_stages
from lightning_strategies_ext._system.gpu_sync import device_clock
from lightning_strategies_ext._system.peers import host_identity
from lightning_strategies_ext.checks import check_flag, check_int
from lightning_strategies_ext.monitoring.advice import JobTraits, advise
from lightning_strategies_ext.monitoring.analysis import RankTimes, combined, exposed_share, logged_metrics, times_of
from lightning_strategies_ext.monitoring.mailbox import Mailbox
from lightning_strategies_ext.monitoring.records import Window
from lightning_strategies_ext.monitoring.step_recorder import StepRecorder
from lightning_strategies_ext.monitoring.trace import spans_of, write_trace
from lightning_strategies_ext.pytorch.parallel import ParallelStrategy
from lightning_strategies_ext.renamed import RenamedAttribute, rejects_old_names
from lightning_strategies_ext.torch_distributed import process_group
from lightning_strategies_ext.torch_distributed.exchange_timer import DDPExchangeTimer

log = logging.getLogger(__name__)

#: Time that rank 0 waits for the last measurements of the other ranks, in seconds.
LAST_WINDOW_TIMEOUT_S = 10.0
#: Maximum number of windows; beyond it, all but the first are combined.
_MAX_HISTORY = 64
_KEY = "communication"
#: Hooks that Lightning calls in each step.
_STEP_HOOKS = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end"),
)
_sessions = count()


class CommunicationMonitor(Callback):
    """Reports how training steps spend their time, on each rank, and which bottleneck limits the job.

    Every ``every_n_steps`` optimizer steps, rank 0 logs their means under ``communication/...``:

    - the bytes and the time of the exchange;
    - its hidden part, which overlaps with the backward pass;
    - its exposed part, which consists of waiting for other ranks and of transfer;
    - the slowest rank, and the phases of a step.

    At the end of ``fit``, it prints one line of advice, and writes a timeline of all ranks: an image, and a trace for
    chrome://tracing or Perfetto.

    It works with all strategies of this package, with Lightning's ``ddp``, and with a single process, which has no
    exchange.

    Args:
        every_n_steps: Number of optimizer steps per mean; the Trainer's ``log_every_n_steps`` if None.
        observed_steps: Number of consecutive steps of these that are measured, or all if there are fewer. A measured
            step takes about 80 microseconds longer. The timeline contains the steps that were measured last.
        dirpath: Directory of the timeline; ``communication`` in the Trainer's ``default_root_dir`` if None.
        progress_bar: Whether the progress bar shows the share of a step that waits for communication.
        plot: Whether to plot the timeline as an image, which requires matplotlib.

    Attributes:
        observed_steps: The argument.
        rank_times: Mean times of each rank over the last ``fit``, without its first steps; on rank 0, and in the main
            process of spawned workers.
        advice: Line of advice; None before the end of ``fit``.
        files: Paths of the written files.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a value is invalid; in ``fit``, if the strategy's exchanges cannot be observed.

    Example::

        from lightning_strategies_ext import CommunicationMonitor

        trainer = Trainer(strategy="ddp_ext", devices=2, callbacks=[CommunicationMonitor()])
        trainer.fit(model)
    """

    times = RenamedAttribute("rank_times")

    @rejects_old_names
    def __init__(
        self,
        every_n_steps: int | None = None,
        observed_steps: int = 3,
        dirpath: str | os.PathLike[str] | None = None,
        progress_bar: bool = True,
        plot: bool = True,
    ) -> None:
        if every_n_steps is not None:
            check_int("every_n_steps", every_n_steps, 1)
        check_int("observed_steps", observed_steps, 1)
        if dirpath is not None and not isinstance(dirpath, (str, os.PathLike)):
            raise TypeError(f"`dirpath` must be a path or None, got {dirpath!r}.")
        check_flag("progress_bar", progress_bar)
        check_flag("plot", plot)
        self._every_n_steps = every_n_steps
        self.observed_steps = observed_steps
        self._dirpath = None if dirpath is None else Path(dirpath)
        self._shows_progress = progress_bar
        self._plots = plot
        self.rank_times: list[RankTimes] = []
        self.advice: str | None = None
        self.files: list[Path] = []
        self._session: StepRecorder | None = None
        self._undo: list[Callable[[], None]] | None = None
        self._history: list[list[RankTimes]] = []
        self._recent: list[Window] = []
        self._shown: str | None = None

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Rejects strategies whose exchanges cannot be observed, and a second monitor.

        Raises:
            ValueError: If the strategy's exchanges cannot be observed, or the Trainer has a second monitor.
        """
        if sum(isinstance(callback, CommunicationMonitor) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError(
                "`callbacks` contains more than one CommunicationMonitor: each would count the other's overhead as"
                " training time. Keep one."
            )
        strategy = trainer.strategy
        is_ddp = isinstance(strategy, (ParallelStrategy, LightningDDPStrategy))
        if (
            stage == "fit"
            and trainer.world_size > 1
            and (not is_ddp or isinstance(strategy, (DeepSpeedStrategy, XLAStrategy)))
        ):
            raise ValueError(
                f"`callbacks=[CommunicationMonitor()]` cannot observe the exchanges of {type(strategy).__name__}."
                " Omit the callback, or use a strategy of this package, such as `strategy='ddp_ext'`, or Lightning's"
                " `ddp`."
            )

    # --- start of training ---

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Starts the measurement; in elastic training, once per world."""
        self._guarded(self._begin, trainer)

    def _begin(self, trainer: "pl.Trainer") -> None:
        self._end_recording()
        self.rank_times, self.advice, self.files = [], None, []
        self._history, self._recent, self._shown = [], [], None
        strategy, model = trainer.strategy, trainer.strategy.model
        exchange_timer = DDPExchangeTimer(model) if isinstance(model, DistributedDataParallel) else None
        every_n_steps = self._every_n_steps or max(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]
        session = StepRecorder(
            *(trainer.global_rank, host_identity(), every_n_steps, self.observed_steps),
            trainer_logging.logger_step(trainer),
            lambda is_on: trainer_stages.set_hooks_enabled(self, _STEP_HOOKS, is_on),
            exchange_timer,
            _counter_of(strategy, exchange_timer),
            _mailbox_of(trainer),
            lambda windows: self._on_windows(trainer, windows),
            self._disable,
            device_clock(strategy.root_device),
        )
        self._session = session
        self._undo = [trainer_stages.wrap_before_fetch(trainer, session.on_fetch_start)]
        if isinstance(strategy, ParallelStrategy):
            strategy.observe_exchanges(session)
            self._undo.append(lambda: strategy.observe_exchanges(None))
        if self._shows_progress and trainer.progress_bar_callback is not None and trainer.is_global_zero:
            self._undo.append(self._show_in(trainer.progress_bar_callback))

    # --- between steps ---

    @override
    def on_train_epoch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Excludes the time between two epochs from the measurement."""
        if self._session is not None:
            self._session.pause()

    @override
    def on_validation_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Excludes the time of a validation from the measurement."""
        if self._session is not None:
            self._session.pause()

    # --- in measured steps ---

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Records the start of a batch."""
        if self._session is not None:
            self._session.on_batch_start()

    @override
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Records the start of a backward pass."""
        if self._session is not None:
            self._session.on_backward_start()

    @override
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Records the end of a backward pass."""
        if self._session is not None:
            self._session.on_backward_end()

    @override
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Records that an optimizer step follows this batch."""
        if self._session is not None:
            self._session.on_optimizer_step()

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Records the end of a batch, and the times of DDP's exchange."""
        if self._session is not None:
            self._guarded(self._session.on_batch_end)

    # --- end of training ---

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Writes the timeline and prints the advice, on rank 0."""
        session = self._session
        if session is None:
            return
        self._guarded(session.finish, trainer_logging.logger_step(trainer), LAST_WINDOW_TIMEOUT_S)
        self._end_recording()
        self._guarded(self._report, trainer, self._plots)

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Writes the measurements that have arrived on rank 0, without waiting for other ranks."""
        if self._session is not None:
            self._end_recording()
            self._guarded(self._report, trainer, False)

    @override
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Ends the measurement if no other hook has ended it."""
        self._end_recording()

    @override
    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in _STEP_HOOKS}
        return {**state, "_session": None, "_undo": None, "_recent": []}

    def _end_recording(self) -> None:
        session, self._session = self._session, None
        undo, self._undo = self._undo, None
        for revert in undo or ():
            revert()
        if session is not None:
            with suppress(Exception):  # if an error is the reason to leave, it has been logged
                session.abandon()
        trainer_stages.set_hooks_enabled(self, _STEP_HOOKS, True)

    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        """Calls a function; an exception ends the monitor and not the training."""
        try:
            function(*args)
        except Exception as error:
            self._disable(error)

    def _disable(self, error: Exception) -> None:
        self._end_recording()
        log.warning("CommunicationMonitor stops, and training continues: %s: %s", type(error).__name__, error)

    # --- on rank 0 ---

    def _on_windows(self, trainer: "pl.Trainer", windows: list[Window]) -> None:
        times = times_of(windows)
        if not all(each.num_steps for each in times):  # the last window may end before its measured steps
            return
        self._history.append(times)
        if len(self._history) > _MAX_HISTORY:
            first, *others = self._history
            self._history = [first, [combined(times_of_rank) for times_of_rank in zip(*others, strict=True)]]
        self._recent = windows
        self._shown = f"{exposed_share(times):.0%}"
        if trainer.loggers:
            values, step = logged_metrics(times), max(0, trainer_logging.logger_step(trainer) - 1)
            for logger in trainer.loggers:
                logger.log_metrics(values, step=step)

    def _show_in(self, progress_bar: Any) -> Callable[[], None]:
        """Adds a value to the progress bar without ``self.log``, which is for the user's metrics."""
        get_metrics = progress_bar.get_metrics

        def get_metrics_with_shown(*args: Any, **kwargs: Any) -> dict[str, Any]:
            shown = {} if self._shown is None else {"comm": self._shown}
            return {**get_metrics(*args, **kwargs), **shown}

        progress_bar.get_metrics = get_metrics_with_shown

        def undo() -> None:
            with suppress(AttributeError):
                del progress_bar.get_metrics

        return undo

    def _report(self, trainer: "pl.Trainer", with_plot: bool) -> None:
        if not self._history:
            return
        history = self._history[1:] or self._history  # the first steps are slower than others
        self.rank_times = [combined(times_of_rank) for times_of_rank in zip(*history, strict=True)]
        self.advice = advise(self.rank_times, _job_of(trainer, self._recent))
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._write(trainer, with_plot)
        self._recent = []
        written = f" Timeline: {', '.join(map(str, self.files))}." if self.files else ""
        rank_zero_info(f"CommunicationMonitor: {self.advice}{written}")

    def _write(self, trainer: "pl.Trainer", with_plot: bool) -> None:
        directory = self._dirpath or Path(trainer.default_root_dir, _KEY)
        directory.mkdir(parents=True, exist_ok=True)
        spans = spans_of(self._recent)
        trace = directory / "trace.json"
        write_trace(spans, trace)
        self.files = [trace]
        if not with_plot:
            return
        from lightning_strategies_ext.monitoring.plot import plot_timeline

        try:
            plot_timeline(spans, directory / "timeline.png")
        except ImportError:
            rank_zero_info(
                "CommunicationMonitor draws no plot, because matplotlib is not installed. Run `pip install"
                " matplotlib`, or set `plot=False`."
            )
        else:
            self.files.append(directory / "timeline.png")


def _counter_of(strategy: Any, exchange_timer: DDPExchangeTimer | None) -> Callable[[int], int] | None:
    """Returns a function that counts the bytes of the last steps; None if each exchange notifies the recorder."""
    if isinstance(strategy, ParallelStrategy) and strategy.num_bytes_exchanged is not None:
        last = strategy.num_bytes_exchanged

        def since_last(num_steps: int) -> int:
            nonlocal last
            before, last = last, strategy.num_bytes_exchanged or last
            return last - before

        return since_last
    if exchange_timer is None:
        return None
    return lambda num_steps: num_steps * exchange_timer.num_bytes


def _mailbox_of(trainer: "pl.Trainer") -> Mailbox | None:
    strategy = trainer.strategy
    store: dist.Store | None = None
    if isinstance(strategy, ParallelStrategy):
        store = strategy.prefix_store("monitor", next(_sessions))
    elif trainer.world_size > 1 and dist.is_initialized():
        prefix = f"lightning_strategies_ext/monitor/{next(_sessions)}"
        store = dist.PrefixStore(prefix, process_group.default_store())
    return None if store is None else Mailbox(store, trainer.global_rank, trainer.world_size)


def _job_of(trainer: "pl.Trainer", windows: Sequence[Window]) -> JobTraits:
    strategy = trainer.strategy if isinstance(trainer.strategy, ParallelStrategy) else None
    model = trainer.strategy.model
    return JobTraits(
        compressions=() if strategy is None else strategy.cheaper_compressions,
        num_buckets=DDPExchangeTimer(model).num_buckets if isinstance(model, DistributedDataParallel) else 0,
        num_hosts=len({window.host for window in windows}),
        is_compressed=strategy is not None and strategy.num_bytes_exchanged is not None,
        is_stock=strategy is None and isinstance(model, DistributedDataParallel),
    )
