"""Hypothesis profiles (HYPOTHESIS_PROFILE=default or all) and one torch thread a worker."""

import os

import jaxtyping
import pytest
import torch
from hypothesis import settings

settings.register_profile("default", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("all", max_examples=200, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

torch.set_num_threads(1)


@pytest.fixture
def as_shipped():
    """Without the type checks of the tests: what a user meets."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
