"""Studies: the paper's tables and figures, kedge's own studies, the kernel theory, and the timing harness.

`plan` declares a suite, `run` trains and scores it, `publish` writes its tables and report; `paper` holds the paper's
numbers. The suites of the paper are in `cifar`, `ablation`, `imagenet_c`, `scood` and `resizing`; kedge's own in
`methods`, `cifar10_fast`, `cifar10_longer` and `insight`; OpenOOD's in `openood`, with its leaderboard in
`leaderboard`. `tasks` are classifiers with frozen features, on which `comparison` runs methods for the study `default`.
"""

import lazy_loader

# As in kedge itself, names are imported when they are first used: ``kedge reproduce --help`` needs no torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
