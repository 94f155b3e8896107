"""Functions of this package that replace methods on objects of Lightning's."""

_SIGNALS = "lightning.pytorch.trainer.connectors.signal_connector:_SignalConnector"
_EPOCH_LOOP = "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop"
_FIT_LOOP = "lightning.pytorch.loops.fit_loop:_FitLoop"

#: Our function → the methods that it replaces.
REPLACED = {
    "_lightning.trainer_signals.intercept_sigterm": [
        f"{_SIGNALS}._sigterm_notifier_fn",
        f"{_EPOCH_LOOP}.advance",
        f"{_EPOCH_LOOP}._broadcast_sigterm_tensor",
    ],
    "_lightning.trainer_signals.intercept_requeueing": [f"{_SIGNALS}._slurm_sigusr_handler_fn"],
    "_lightning.trainer_stages.surround_fit": [f"{_FIT_LOOP}.run", f"{_FIT_LOOP}.on_advance_start"],
    "_lightning.trainer_stages.before_fetch": [f"{_EPOCH_LOOP}._on_before_fetch"],
    "_lightning.trainer_data.after_setup_data": [f"{_FIT_LOOP}.setup_data"],
}
