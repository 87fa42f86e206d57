"""Sweeps: over any executor, once each, whatever is killed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from anyformer.errors import AnyformerError
from anyformer.learning.checkpoints import checkpoints
from anyformer.learning.models import FullyTrained
from anyformer.learning.runs import RunConfig, run_training
from anyformer.learning.sweeps import RayExecutor, sweep
from anyformer.learning.training import TrainingConfig
from anyformer.targets.transformer import TransformerConfig
from anyformer.tasks import Dyck

SMALL = TransformerConfig(vocab=4, heads=1, layers=1, head_dim=4, features=8, residual=True, norm="rms")
BRIEF = TrainingConfig(steps=12, batch_size=2, warm_up=2, evaluate_every=4, evaluation_size=8, learning_rate=0.01)
CONFIGS = [RunConfig(task=Dyck(), model=FullyTrained(config=SMALL), training=replace(BRIEF, seed=seed)) for seed in (0, 1, 2)]
BAD = replace(CONFIGS[0], task=Dyck(vocab=7))  # the transformer has 4 tokens
LONG = [replace(c, training=replace(BRIEF, seed=i, steps=300, evaluate_every=10)) for i, c in enumerate(CONFIGS)]


class Immediate(Executor):
    """Runs what is submitted at once, in this process, and counts."""

    def __init__(self):
        self.calls = 0

    def submit(self, fn, /, *args, **kwargs):
        self.calls += 1
        future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


def weights(folder: Path) -> bytes:
    return (folder / "result" / "model.safetensors").read_bytes()


def test_every_configuration_once_and_finished_runs_are_skipped(tmp_path: Path):
    alone = [run_training(config, tmp_path / "alone") for config in CONFIGS]
    executor, told = Immediate(), []
    run_training(CONFIGS[1], tmp_path / "runs")
    threads = torch.get_num_threads()
    result = sweep([*CONFIGS, CONFIGS[0]], executor, tmp_path / "runs", lambda *news: told.append(news))
    assert torch.get_num_threads() == threads
    assert executor.calls == 2 and result.skipped == (CONFIGS[1].name,) and result.passed
    assert [run.folder for run in result.runs] == [tmp_path / "runs" / config.name for config in CONFIGS]
    assert [weights(run.folder) for run in result.runs] == [weights(run.folder) for run in alone]
    assert sorted(told, key=lambda n: n[0]) == sorted(((r.folder.name, r) for r in result.runs), key=lambda n: n[0])
    again = sweep(CONFIGS, executor, tmp_path / "runs")
    assert executor.calls == 2 and again.runs == result.runs and len(again.skipped) == 3


def test_failures_are_collected_and_the_others_finish(tmp_path: Path):
    damaged = tmp_path / CONFIGS[2].name
    run_training(CONFIGS[2], tmp_path)
    (damaged / "finished.json").write_text("{")
    diverges = replace(CONFIGS[0], training=replace(BRIEF, learning_rate=1e30, clip=None))
    result = sweep([BAD, CONFIGS[0], diverges, CONFIGS[2]], Immediate(), tmp_path)
    assert [run.folder.name for run in result.runs] == [CONFIGS[0].name] and not result.passed
    reasons = dict(result.failures)
    assert "the task has 7 tokens, the transformer 4" in reasons[BAD.name]
    assert "the loss is" in reasons[diverges.name] and "finished.json is damaged" in reasons[CONFIGS[2].name]


@dataclass(frozen=True, kw_only=True)
class Broken(FullyTrained):
    """A model of one's own with a mistake in it."""

    def build(self, task, seed):
        raise ZeroDivisionError("my mistake")


@dataclass(frozen=True, kw_only=True)
class Quits(FullyTrained):
    """A model that ends its process."""

    def build(self, task, seed):
        os._exit(1)


def test_other_exceptions_are_failures_too(tmp_path: Path):
    broken = replace(CONFIGS[0], model=Broken(config=SMALL))
    assert sweep([broken, CONFIGS[0]], Immediate(), tmp_path).failures == ((broken.name, "ZeroDivisionError: my mistake"),)


def test_threads_train_one_after_another_with_the_same_bits(tmp_path: Path):
    with ThreadPoolExecutor(3) as executor:
        result = sweep(CONFIGS, executor, tmp_path / "threads")
    assert [weights(run.folder) for run in result.runs] == [
        weights(run_training(config, tmp_path / "alone").folder) for config in CONFIGS
    ]


def test_an_executor_that_breaks_is_named(tmp_path: Path):
    quits = replace(CONFIGS[0], model=Quits(config=SMALL))
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as executor:
        result = sweep([quits], executor, tmp_path)
    assert result.failures == ((quits.name, "its executor broke before the run was finished; call sweep again with a new one"),)


def kill_one(folder: Path, killed: list[int]) -> threading.Thread:
    """Kill (-9) the first worker whose run has made a checkpoint, once."""

    def watch() -> None:
        while not killed:
            for path in folder.glob("*/checkpoints/step-*"):
                run = path.parents[1]
                if not (run / "finished.json").exists():
                    killed.append(int((run / ".lock").read_text()))
                    os.kill(killed[0], signal.SIGKILL)
                    return
            time.sleep(0.005)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def check_after_the_kill(result, told, folder: Path) -> None:
    """Every run finished, once, with the bits of a run alone, and one of them in two sessions."""
    assert result.passed and len(result.runs) == len(LONG) and sorted(name for name, _ in told) == sorted(c.name for c in LONG)
    for config, run in zip(LONG, result.runs, strict=True):
        steps = [json.loads(line)["step"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(10, 301, 10)) and run.finished and run.folder.name == config.name
    assert weights(result.runs[0].folder) == weights(run_training(LONG[0], folder / "alone").folder)


def test_the_pool_survives_a_killed_worker(tmp_path: Path, caplog):
    killed, told = [], []
    thread = kill_one(tmp_path / "runs", killed)
    result = sweep(LONG, folder=tmp_path / "runs", report=lambda *news: told.append(news))
    thread.join()
    assert "a worker of the sweep was killed" in caplog.text and killed
    check_after_the_kill(result, told, tmp_path)


def test_ctrl_c_ends_the_workers(tmp_path: Path):
    endless = replace(LONG[0], training=replace(LONG[0].training, steps=10**6))
    lock = tmp_path / endless.name / ".lock"

    def interrupt(*_) -> None:
        while not (lock.exists() and lock.read_text()):
            time.sleep(0.01)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep([CONFIGS[0], endless], folder=tmp_path, report=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(lock.read_text()), 0)


SWEEP = """
import json, sys
from anyformer.learning import sweep
from anyformer.spec import Spec
if __name__ == "__main__":
    sweep([Spec.from_json(config) for config in json.loads(sys.argv[2])], folder=sys.argv[1])
"""


def test_workers_end_with_the_process_that_sweeps(tmp_path: Path):
    """kill -9 of the sweep: its workers write a checkpoint and leave, so that the runs can go on."""
    (tmp_path / "script.py").write_text(SWEEP)
    endless = [replace(c, training=replace(c.training, steps=100_000, evaluate_every=50_000)) for c in LONG[:2]]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path), json.dumps([c.to_json() for c in endless])]
    locks = [tmp_path / config.name / ".lock" for config in endless]
    with subprocess.Popen(command, env=environment) as process:
        while process.poll() is None and not any(lock.exists() and lock.read_text() for lock in locks):
            time.sleep(0.05)
        time.sleep(1)  # one worker, or two: as many as cores
        process.kill()
    workers = {lock: int(lock.read_text()) for lock in locks if lock.exists() and lock.read_text()}
    deadline = time.monotonic() + 40
    while any(_lives(worker) for worker in workers.values()):
        assert time.monotonic() < deadline, "the workers train on for nobody"
        time.sleep(0.1)
    assert all(checkpoints(lock.parent / "checkpoints") for lock in workers), "stopped without a checkpoint"


OWN_TASK = """
import sys
from dataclasses import dataclass
from anyformer.learning import FullyTrained, RunConfig, TrainingConfig, sweep
from anyformer.targets.transformer import TransformerConfig
from anyformer.tasks import Task, below

@dataclass(frozen=True, kw_only=True)
class Echo(Task):
    length: int = 5
    names = ("0", "1")
    words = 5
    def _draw(self, words):
        return below(words, 2), below(words, 2)

if __name__ == "__main__":
    small = FullyTrained(config=TransformerConfig(vocab=2, heads=1, layers=1, head_dim=2, features=2))
    training = TrainingConfig(steps=2, batch_size=2, warm_up=1, evaluation_size=4)
    result = sweep([RunConfig(task=Echo(length=5), model=small, training=training)], folder=sys.argv[1])
    print(result.failures, [run.finished for run in result.runs])
"""


def test_a_task_that_a_script_defines_is_swept(tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN_TASK)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, tmp_path / "own.py", tmp_path], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "() [True]", done.stdout + done.stderr


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{process}/stat").read_text().split(")")[-1].split()[0] if Path("/proc").is_dir() else True


def test_ray_survives_a_killed_worker(tmp_path: Path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    killed, told = [], []
    thread = kill_one(tmp_path / "runs", killed)
    with RayExecutor(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR") as executor:
        result = sweep(LONG, executor, tmp_path / "runs", lambda *news: told.append(news))
    thread.join()
    assert killed
    check_after_the_kill(result, told, tmp_path)


def test_ray_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(AnyformerError, match=r"needs the package ray; install it with pip install 'anyformer\[ray\]'"):
        RayExecutor()
