"""Hypothesis profiles (HYPOTHESIS_PROFILE=default or all) and one torch thread a worker."""

import os
import signal
import threading
from pathlib import Path

import jaxtyping
import pytest
import torch
from hypothesis import settings

settings.register_profile("default", max_examples=16, deadline=None, derandomize=True)
settings.register_profile("all", max_examples=200, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

torch.set_num_threads(1)


@pytest.fixture
def as_shipped():
    """Without the type checks of the tests: what a user meets."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run (run_cases.CONFIG) that nothing ended."""
    from run_cases import CONFIG

    from anyformer.learning.runs import run_training

    return run_training(CONFIG, tmp_path_factory.mktemp("reference")).folder


@pytest.fixture(autouse=True, scope="session")
def _interrupts():
    """Ctrl-C is heard, also where the tests were started in the background of a shell, which then ignores it for them and their children."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
