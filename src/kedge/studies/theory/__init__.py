"""The theory behind anchoring: the neural tangent kernel of pairs [c, x - c], exactly and as the paper has it.

`ntk` has the kernels, `toy` a problem and its predictors, `approximation` and `disagreement` the two questions, `study`
all results, `page` the report.
"""
