"""kedge: image classifiers that know when they are out of their depth."""

from importlib.metadata import version

import lazy_loader

__version__ = version("kedge")

# Names are imported when they are first used; ``__init__.pyi`` lists them, for type checkers too.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
