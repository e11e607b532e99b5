"""Random seeds: derived from several numbers, or set for a block of code."""

import contextlib
from collections.abc import Iterator

import torch

_MASK = (1 << 64) - 1


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global CPU generator inside the block, and restore it afterwards."""
    state = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(seed)
        yield
    finally:
        torch.set_rng_state(state)


def mix_seed(seed: int, *more: int) -> int:
    """Derive a seed from several integers, such that neighboring ones give unrelated draws."""
    mixed = 0
    for value in (seed, *more):
        # The finalizer of splitmix64, which spreads every input bit over the whole word.
        mixed = (mixed + 0x9E3779B97F4A7C15 + (value & _MASK)) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed >> 1  # torch takes seeds below 2 ** 63
