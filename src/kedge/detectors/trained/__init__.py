"""Methods with a loss of their own: a network to prepare, a loss to train it with, and the detector."""
