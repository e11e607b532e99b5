"""The theory behind anchoring: the neural tangent kernel of pairs [c, x - c], exactly and as the paper has it."""

from kedge.studies.theory.ntk import (
    anchored_kernel,
    approximate_anchored_kernel,
    encode,
    gamma,
    h_ntk,
    predict,
    spectrum,
)
from kedge.studies.theory.study import NTKStudy, ntk_study
from kedge.studies.theory.toy import ToyProblem, toy_problem

__all__ = [
    "NTKStudy",
    "ToyProblem",
    "anchored_kernel",
    "approximate_anchored_kernel",
    "encode",
    "gamma",
    "h_ntk",
    "ntk_study",
    "predict",
    "spectrum",
    "toy_problem",
]
