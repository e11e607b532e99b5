"""What every test runs under."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Keep to one thread: on networks this small, threads that wait for busy cores cost a hundred times the work."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    """Start every test from the same state of torch's generator."""
    torch.manual_seed(0)
