"""``ddp_ray_ext`` on one machine: the behavior of ``ddp_spawn_ext``, with workers that Ray starts."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_strategies_ext import DDPRayStrategy, WorkerDiedError, WorkerRaisedError
from tests.support.ddp_spawn_trainers import Node, Stateful, seeded
from tests.support.models import MLP, assert_same_bits, loader, make_trainer, state_of
from tests.support.ranks import REPOSITORY
from tests.support.ray_clusters import FOREVER_S, HALF, assert_no_process_remains, needs_ray, own_ray

pytestmark = [pytest.mark.processes, needs_ray, pytest.mark.timeout(FOREVER_S)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with own_ray():
        yield


def on_ray(devices: int = 2, **kwargs: Any) -> Trainer:
    return make_trainer(DDPRayStrategy(**HALF), devices=devices, **kwargs)


class Records(Callback):
    """A user's callback with several kinds of attributes."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.node = Node()
        self.tensor = torch.zeros(3)
        self.niceness = -1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append(trainer.global_step)
        self.niceness = os.nice(0)
        self.node.values.append(batch_idx)
        self.tensor += 1


def test_ray_workers_train_as_spawned_workers_and_return_all_results(tmp_path):
    results = []
    for trainer in (make_trainer("ddp_spawn_ext", max_epochs=2), on_ray(max_epochs=2)):
        model, records = seeded(Stateful), Records()
        steps, node = records.steps, records.node
        saves = ModelCheckpoint(tmp_path / type(trainer.strategy).__name__, monitor="loss_epoch", save_top_k=2)
        trainer.callbacks += [records, saves]
        trainer.fit(model, loader(shuffle=True))
        first = state_of(model)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(model, loader(shuffle=True))
        assert steps is records.steps == list(range(1, 25))
        assert node is records.node
        assert records.niceness == os.nice(0)
        assert Path(saves.best_model_path).exists()
        optimizer = trainer.optimizers[0]
        assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
        results.append(
            {
                **{f"first.{name}": tensor for name, tensor in first.items()},
                **state_of(model),
                **{name: metric.clone() for name, metric in trainer.callback_metrics.items()},
                "Adam": optimizer.state[next(model.parameters())]["exp_avg"].clone(),
                "best": saves.best_model_score.clone(),
                "tensor": records.tensor.clone(),
                "node": torch.tensor(node.values),
                "random": torch.rand(3),
            }
        )
    assert_same_bits(*results)


def test_workers_are_reused_and_predictions_are_in_the_order_of_the_dataset():
    trainer = on_ray()
    model = seeded()
    trainer.fit(model, loader())
    pids = trainer.strategy.launcher.pids
    predictions = trainer.predict(model, loader(num_samples=31))
    assert trainer.strategy.launcher.pids == pids
    assert len(set(pids)) == 2
    expected = model.net(next(iter(loader(num_samples=31, batch_size=31)))[0])
    assert torch.allclose(torch.cat(predictions), expected)
    (metrics,) = trainer.validate(model, loader(), verbose=False)
    assert metrics["val_loss"] == trainer.callback_metrics["val_loss"].item()


class Large(MLP):
    """A model with 48 MB of weights, some of them in a tensor that is sent in several pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(12_000_000))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + ((self.large - 1) ** 2).mean() * 1e6

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_large_tensors_are_returned_and_are_writable():
    model = Large()
    address = model.large.data_ptr()
    trainer = on_ray(max_epochs=1)
    trainer.fit(model, loader(16))
    assert model.large.data_ptr() == address
    assert (model.large > 0).all()
    assert model.large.unique().numel() == 1
    model.large.data += 1


class Prints(Callback):
    def on_train_start(self, trainer, pl_module):
        print(f"rank {trainer.global_rank} (local {trainer.local_rank}) of {trainer.world_size} speaks")
        os.system("echo a child of it, too")


def test_the_output_of_workers_is_printed_before_fit_returns(capfd):
    on_ray(callbacks=[Prints()], max_epochs=1).fit(MLP(), loader())
    shown = capfd.readouterr().out
    assert "rank 0 (local 0) of 2 speaks\n" in shown
    assert "rank 1 (local 1) of 2 speaks\n" in shown
    assert shown.count("a child of it, too\n") == 2


def test_a_progress_bar_is_that_of_rank_zero(capfd):
    on_ray(max_epochs=1, enable_progress_bar=True).fit(MLP(), loader())
    assert "8/8" in "".join(capfd.readouterr())


def test_a_function_runs_without_a_trainer():
    with DDPRayStrategy(2, **HALF, parallel_devices=[torch.device("cpu")]) as strategy:
        assert strategy.spawn(sum_of_ranks) == 1
        assert strategy.spawn(lambda: 7) == 7


@pytest.mark.parametrize(
    ("chosen", "received"),
    [
        (None, ["CHOSEN_1", "CHOSEN_2", "OTHER"]),
        (["CHOSEN_*"], ["CHOSEN_1", "CHOSEN_2"]),
        (["!CHOSEN_*"], ["OTHER"]),
        (["CHOSEN_*", "*", "!CHOSEN_2"], ["CHOSEN_1", "OTHER"]),
        ([], []),
    ],
)
def test_workers_receive_the_variables_that_the_user_chooses(monkeypatch, chosen, received):
    names = ["CHOSEN_1", "CHOSEN_2", "OTHER", "RAY_AUTH_TOKEN", "SSH_AUTH_SOCK"]
    for name in names:
        monkeypatch.setenv(name, "value of the main process")  # Ray started before the variable was set
    devices = [torch.device("cpu")]
    with DDPRayStrategy(1, **HALF, parallel_devices=devices, environment_variables=chosen) as strategy:
        seen = strategy.spawn(lambda: [name for name in names if os.environ.get(name) == "value of the main process"])
        assert seen == received
        assert strategy.spawn(lambda: os.environ["OMP_NUM_THREADS"]) == os.environ.get("OMP_NUM_THREADS", "1")


def sum_of_ranks() -> int:
    tensor = torch.tensor(torch.distributed.get_rank())
    torch.distributed.all_reduce(tensor)
    return int(tensor)


CELLS = (
    """
import lightning.pytorch as pl
import torch
from lightning_strategies_ext import DDPRayStrategy
from tests.support.models import loader, make_trainer

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 3)
        self.notes = []

    def training_step(self, batch, batch_idx):
        self.notes.append(note(batch_idx))
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def note(batch_idx):
    return batch_idx + offset

offset = 10
""",
    """
model = Net()
trainer = make_trainer(DDPRayStrategy(num_cpus_per_worker=0.5), max_epochs=1)
trainer.fit(model, loader(16))
pids = trainer.strategy.launcher.pids
print(model.notes, type(model) is Net)
""",
    """
class Other(Net):
    def training_step(self, batch, batch_idx):
        print("in the other")
        return super().training_step(batch, batch_idx)

offset = 20
other = make_trainer(DDPRayStrategy(num_cpus_per_worker=0.5), max_epochs=1)
other.fit(model := Other(), loader(16))
print(model.notes, type(model) is Other, other.strategy.launcher.pids == pids)
other.strategy.close()
""",
)


def test_definitions_of_notebook_cells_reach_reused_workers(tmp_path, monkeypatch):
    import ray

    nbformat = pytest.importorskip("nbformat", reason="notebooks need nbformat, nbclient and ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="notebooks need nbformat, nbclient and ipykernel")
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # makes Ray use the address 127.0.0.1
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=FOREVER_S, startup_timeout=FOREVER_S).execute()
    printed = ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]
    assert "[10, 11] True\n" in printed[1]
    assert printed[2].count("in the other") == 4
    assert "[20, 21] True True\n" in printed[2]


# --- failures ---


class MyError(Exception):
    pass


class Fails(MLP):
    def __init__(self, behavior: str) -> None:
        super().__init__()
        self.behavior = behavior

    def training_step(self, batch, batch_idx):
        if self.global_step == 3 and self.global_rank == 1:
            if self.behavior == "raises":
                raise MyError("bad sample")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def test_an_error_names_rank_host_and_cause_and_another_fit_works():
    trainer = on_ray()
    with pytest.raises(WorkerRaisedError) as raised:
        trainer.fit(Fails("raises"), loader())
    message = str(raised.value)
    assert f"rank 1 (pid {raised.value.error_pid} on 127.0.0.1) failed: MyError: bad sample" in message
    assert "in training_step" in message
    assert type(raised.value.__cause__) is MyError
    trainer.fit(MLP(), loader())
    assert trainer.state.finished


def test_a_killed_worker_is_detected_at_once():
    trainer = on_ray()
    began = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"rank 1 \(pid \d+ on 127.0.0.1\) exited.*Ray reports: .*killed"):
        trainer.fit(Fails("dies"), loader())
    assert time.monotonic() - began < 280  # the hang timeout is five minutes
    trainer.fit(MLP(), loader())
    assert trainer.state.finished


def test_a_worker_is_lost_if_ray_reports_only_a_broken_pipe():
    import ray
    from ray.exceptions import RaySystemError

    from lightning_strategies_ext.launch.protocol import Ping
    from lightning_strategies_ext.launch.ray.ray_worker import RayWorker
    from lightning_strategies_ext.launch.ray.worker_link import LinkServer

    class Actor:
        def __init__(self, *args: Any) -> None:
            pass

        def handle(self, *args: Any) -> None:
            raise RaySystemError("Broken pipe")  # as Ray does between the exit and its detection

    link_server = LinkServer("127.0.0.1")
    worker = RayWorker(1, 0, 0, link_server, {"num_cpus": 0.1}, ray.remote(Actor), is_elastic=False)
    try:
        worker.send(Ping())
        reply = worker.wait_for_message(300)
    finally:
        worker.close()
        link_server.close()
    assert isinstance(reply, WorkerDiedError)
    assert "System error: Broken pipe" in str(reply)


class Slow(MLP):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        if self.global_step == 3:
            (self.directory / f"training{self.global_rank}").touch()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_ranks_and_their_state_is_returned(tmp_path, signum):
    def press() -> None:
        while len(list(tmp_path.iterdir())) < 2 and not is_over.wait(0.02):
            pass
        if not is_over.is_set():
            os.kill(os.getpid(), signum)

    is_over = threading.Event()
    before = signal.getsignal(signum)
    signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    model, trainer = Slow(tmp_path), on_ray(max_epochs=-1)
    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(SystemExit):
            trainer.fit(model, loader())
    finally:
        is_over.set()
        thread.join()
        signal.signal(signum, before)
    assert trainer.global_step > 3
    assert trainer.received_sigterm == (signum == signal.SIGTERM)


def test_no_actor_remains_in_the_cluster_after_the_workers_have_exited():
    trainer = on_ray()
    trainer.fit(MLP(), loader())
    pids = trainer.strategy.launcher.pids
    trainer.strategy.close()
    assert trainer.strategy.launcher.pids == []
    assert_no_process_remains(pids)


# --- rejected arguments ---


def test_more_than_the_cluster_has_is_refused_with_numbers():
    num_cpus = len(os.sched_getaffinity(0))
    for arguments, message in (
        ({"num_workers": 1000}, rf"1000 CPUs, but the Ray cluster has {num_cpus}\b"),
        ({"num_workers": 2, "resources_per_worker": {"fast": 1}}, r"2 of 'fast', but the Ray cluster has 0\b"),
        ({"num_workers": 1, "num_cpus_per_worker": 1000}, "1000 CPUs"),
    ):
        trainer = make_trainer(DDPRayStrategy(**arguments), devices=1)
        with pytest.raises(ValueError, match=message):
            trainer.fit(MLP(), loader())


def test_arguments_of_the_trainer_that_contradict_the_strategy_are_refused():
    with pytest.raises(ValueError, match="num_workers=2"):
        make_trainer(DDPRayStrategy(2), devices=3)
    with pytest.raises(ValueError, match="Ray decides"):
        make_trainer(DDPRayStrategy(2), devices=1, num_nodes=2)
    with pytest.raises(ValueError, match="num_gpus_per_worker=1"):
        make_trainer(DDPRayStrategy(2, num_gpus_per_worker=1), devices=1)
