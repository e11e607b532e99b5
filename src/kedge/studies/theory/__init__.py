"""The theory behind anchoring: the neural tangent kernel of pairs [c, x - c], exactly and as the paper has it.

`ntk` has the kernels, `toy` a problem and its predictors, `approximation` and `disagreement` the two questions, `study`
all results, `page` the report.
"""

from kedge.studies.theory.ntk import (
    anchored_kernel,
    approximate_anchored_kernel,
    encode,
    gamma,
    h_ntk,
    predict,
    spectrum,
)
from kedge.studies.theory.page import run_ntk
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
    "run_ntk",
    "spectrum",
    "toy_problem",
]
