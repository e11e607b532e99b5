"""What every test runs under."""

import functools
import math
import sys
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

import torchvision_ops  # noqa: F401 -- before timm and transformers look for torchvision
from kedge.detectors import training_images

settings.register_profile("the same in every run", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("the same in every run")


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


@pytest.fixture(autouse=True, scope="session")
def one_registry():
    """Build torch's table of ONNX operations once, and not in each export, if any file of tests exports."""
    if "kedge.export" not in sys.modules or find_spec("onnxscript") is None:
        yield
        return
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
        yield


def pytest_configure(config):
    """Networks of tests take pixels as they are, without a warning each."""
    config.addinivalue_line("filterwarnings", "ignore::kedge.errors.NormalisationWarning")
