"""Adapters to other libraries. `kedge.adapters.lightning`, which needs Lightning, is imported by its own name."""

from kedge.adapters.peers import ForPytorchOOD, FromPytorchOOD, pytorch_ood

__all__ = ["ForPytorchOOD", "FromPytorchOOD", "pytorch_ood"]
