"""What every test runs under."""

import math

import pytest
import torch

import torchvision_ops  # noqa: F401 -- before timm and transformers look for torchvision
from kedge.detectors import training_images


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Keep to one thread: on networks this small, threads that wait for busy cores cost a hundred times the work."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    """Start every test from the same state of torch's generator."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def toy_sets_may_overlap():
    """Let tests fit and calibrate on the same few images; test_leakage.py tests the check itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_images, "SHARED", math.inf)
        yield


def pytest_configure(config):
    """Networks of tests take pixels as they are, without a warning each."""
    config.addinivalue_line("filterwarnings", "ignore::kedge.errors.NormalisationWarning")
