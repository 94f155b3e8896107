"""Functions of this package that replace methods of Lightning's objects, or functions that are no longer called.

An overridden method of Lightning calls the latter functions, but the method of this package does not.
"""

from tests.overrides.sources import renamed

_SIGNALS = "lightning.pytorch.trainer.connectors.signal_connector:_SignalConnector"
_EPOCH_LOOP = "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop"
_FIT_LOOP = "lightning.pytorch.loops.fit_loop:_FitLoop"
_EARLY_STOPPING = "lightning.pytorch.callbacks.early_stopping:EarlyStopping"
_DDP = "lightning.pytorch.strategies.ddp:DDPStrategy"
_FABRIC_DDP = "lightning.fabric.strategies.ddp:DDPStrategy"
_OVERRIDES = "lightning.pytorch.overrides.distributed"
_DISTRIBUTED = "lightning.fabric.utilities.distributed"
_FABRIC_LAUNCHERS = "lightning.fabric.strategies.launchers"
_WORKERS = "lightning.pytorch.strategies.launchers.multiprocessing:_MultiProcessingLauncher"
_FABRIC_WORKERS = "lightning.fabric.strategies.launchers.multiprocessing:_MultiProcessingLauncher"

#: Function of this package → the methods that it replaces.
SET_ON_OBJECTS = {
    "_lightning.trainer_signals.intercept_sigterm": [
        f"{_SIGNALS}._sigterm_notifier_fn",
        f"{_EPOCH_LOOP}.advance",
        f"{_EPOCH_LOOP}._broadcast_sigterm_tensor",
    ],
    "_lightning.trainer_signals.intercept_requeueing": [f"{_SIGNALS}._slurm_sigusr_handler_fn"],
    "_lightning.trainer_stages.wrap_fit_loop": [
        f"{_FIT_LOOP}.run",
        f"{_FIT_LOOP}.on_advance_start",
        "lightning.pytorch.trainer.trainer:Trainer._run_stage",
    ],
    "_lightning.trainer_stages.before_train_end": [f"{_FIT_LOOP}.on_run_end"],
    "_lightning.trainer_stages.skip_trials": [
        "lightning.pytorch.callbacks.lr_finder:LearningRateFinder.lr_find",
    ],
    "_lightning.trainer_stages.wrap_before_fetch": [f"{_EPOCH_LOOP}._on_before_fetch"],
    "_lightning.samplers._replace_order": [f"{_DISTRIBUTED}:DistributedSamplerWrapper.set_epoch"],
    "_lightning.strategy_parts.wrap_stages_on_one_device": [
        "lightning.pytorch.strategies.strategy:Strategy.setup_environment",
        "lightning.pytorch.strategies.strategy:Strategy.teardown",
    ],
    "_lightning.trainer_decisions._share_with_checkpoint": [
        "lightning.pytorch.callbacks.model_checkpoint:ModelCheckpoint._monitor_candidates"
    ],
    "_lightning.trainer_decisions._share_with_early_stopping": [
        f"{_EARLY_STOPPING}._run_early_stopping_check",
        f"{_EARLY_STOPPING}._validate_condition_metric",
    ],
    "_lightning.trainer_decisions._share_with_schedulers": [f"{_EPOCH_LOOP}._get_monitor_value"],
    "_lightning.trainer_decisions.call_after_epoch": [f"{_FIT_LOOP}.on_advance_end"],
    "_lightning.trainer_decisions.call_at_points": [
        f"{_FIT_LOOP}.on_run_start",
        f"{_FIT_LOOP}.on_advance_end",
        "lightning.pytorch.loops.evaluation_loop:_EvaluationLoop.run",
    ],
    "_lightning.trainer_data._accept_empty_streams": [
        "lightning.pytorch.strategies.strategy:Strategy.process_dataloader"
    ],
    "_lightning.trainer_data.after_setup_data": [f"{_FIT_LOOP}.setup_data"],
    "_lightning.trainer_data.before_loader_results": [
        "lightning.pytorch.loops.evaluation_loop:_EvaluationLoop._store_dataloader_outputs"
    ],
    "_lightning.trainer_data.evaluate_without_data": [
        "lightning.pytorch.loops.evaluation_loop:_EvaluationLoop.setup_data",
        "lightning.pytorch.loops.prediction_loop:_PredictionLoop.setup_data",
    ],
    "_lightning.trainer_data.shadow_evaluation_steps": [
        "lightning.pytorch.loops.evaluation_loop:_EvaluationLoop.reset",
        "lightning.pytorch.loops.evaluation_loop:_EvaluationLoop._evaluation_step",
        "lightning.pytorch.loops.evaluation_loop:_EvaluationLoop.run",
    ],
    "_lightning.trainer_data.shard_without_repeats": [
        "lightning.pytorch.trainer.connectors.data_connector:_DataConnector._resolve_sampler"
    ],
    "_lightning.trainer_data.predict_with_few_samples": [
        "lightning.pytorch.trainer.connectors.data_connector:_DataConnector._resolve_sampler"
    ],
}
#: Function of this package → the functions that it replaces.
CALLED_INSTEAD = {
    "collectives.base.Collectives.all_gather": [f"{_DISTRIBUTED}:_all_gather_ddp_if_available"],
    "collectives.base.Collectives.broadcast_module": [f"{_OVERRIDES}:_sync_module_states"],
    "collectives.base.Collectives.reduce": [f"{_DISTRIBUTED}:_sync_ddp_if_available", f"{_DISTRIBUTED}:_sync_ddp"],
    "launch.processes.process_settings.ProcessSettings.apply": [
        f"{_FABRIC_LAUNCHERS}.multiprocessing:_GlobalStateSnapshot.capture",
        f"{_FABRIC_LAUNCHERS}.multiprocessing:_GlobalStateSnapshot.restore",
    ],
    "launch.processes.worker_process.ProcessStarter.check_can_start": [
        f"{_FABRIC_LAUNCHERS}.multiprocessing:_check_bad_cuda_fork"
    ],
    "launch.script_launcher.running_script_processes": [
        f"{_FABRIC_LAUNCHERS}.subprocess_script:_ChildProcessObserver._run"
    ],
    "launch.worker_group.WorkerGroup._num_threads": [
        f"{_DISTRIBUTED}:_set_num_threads_if_needed",
        f"{_DISTRIBUTED}:_suggested_max_num_threads",
    ],
    "launch.worker_group.WorkerGroup.check_can_start": [
        f"{_FABRIC_LAUNCHERS}.multiprocessing:_check_missing_main_guard"
    ],
    "launch.worker_launcher.WorkerLauncher.launch": [
        f"{_WORKERS}.launch",
        f"{_WORKERS}._wrapping_function",
        f"{_WORKERS}._recover_results_in_main_process",
        f"{_WORKERS}._collect_rank_zero_results",
        f"{_WORKERS}.update_main_process_results",
        f"{_WORKERS}.get_extra_results",
        f"{_WORKERS}.kill",
        f"{_FABRIC_WORKERS}._wrapping_function",
    ],
    "torch_distributed.communication_hook.PostLocalSGD.attach": [f"{_DDP}._enable_model_averaging"],
    "torch_distributed.communication_hook.CommunicationHook.wrap": [
        f"{_DDP}._register_ddp_hooks",
        f"{_OVERRIDES}:_register_ddp_comm_hook",
    ],
    "torch_distributed.ddp_advice.explain_unused_parameters": [
        "lightning.pytorch.utilities.exceptions:_augment_message"
    ],
    "torch_distributed.process_group.default_backend": [
        f"{_DDP}._get_process_group_backend",
        f"{_FABRIC_DDP}._get_process_group_backend",
        f"{_DISTRIBUTED}:_get_default_process_group_backend_for_device",
    ],
    "torch_distributed.process_group.start": [f"{_DISTRIBUTED}:_init_dist_connection"],
    "torch_distributed.wrapping.wrap_in_ddp": [
        f"{_DDP}.determine_ddp_device_ids",
        f"{_FABRIC_DDP}._determine_ddp_device_ids",
    ],
}
REPLACED = {override: [*map(renamed, targets)] for override, targets in {**SET_ON_OBJECTS, **CALLED_INSTEAD}.items()}
