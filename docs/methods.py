"""Write docs/methods.md out of the docstrings of the methods: ``python docs/methods.py``.

The table at the top groups methods by their ``reads`` and quotes the sentence "Use it ..." of each docstring. Passes
are those of the docstrings of ``cost``, and times those that ``benchmarks/peers.py`` measured.
"""

import inspect
import json
import re
from collections.abc import Iterable
from pathlib import Path

import kedge
from kedge.detectors import TTA, Detector, LowLevelStatistics, TrainedDetector
from kedge.detectors.registry import registered

CONTROLS = (TTA, LowLevelStatistics)
OWN_TRAINING = "a network with its own training"
GROUPS = {  # by ``reads``, in the order of the table
    "logits": "logits",
    "features": "the features before the last layer",
    "maps": "maps inside the network",
    "gradients": "gradients",
    "per_anchor_logits": "several passes",
    "passes": "several passes",
    "images": "the images alone",
    "network": "scores of other methods",
    "output": OWN_TRAINING,
}

HEAD = """# The methods

<!-- Written by docs/methods.py from the docstrings in src/kedge/detectors; edit them, then run `make tables`. -->

Every method is a class with the same verbs, so a user can swap one word:

```python
detector = kedge.Energy(net).fit(train_set).calibrate(held_out)
detector = kedge.KNN(net).fit(train_set).calibrate(held_out)
```

A larger score always means further out of distribution. The methods on a trained network run on unanchored networks
and on those of `kedge.anchor`, with logits and features averaged over the anchors; AMP runs on anchored networks
alone, and Student on the unanchored ones that `kedge.distill` trains from them.
`kedge reproduce methods` trains the networks and prints all methods in one table. Methods that learn from
outliers have a star there, and `kedge.evaluate` refuses sets that hold any of the images they learned from.

The defaults of a method's options are its paper's. `kedge.tune` chooses others without OOD images, by classes that are
held out or by synthetic outliers, and the file of the detector records the choice:

```python
detector = kedge.tune("knn", net, train_set, held_out, by="classes").fit(train_set).calibrate(more_held_out)
detector = kedge.protect(net, train_set, held_out, method="knn", tune="synthetic")
```

They work for 2 to 1,000 classes and features of any width, on convolutional networks and on transformers that read a
class token or pool all tokens. Where images are fewer than features, `mds`, `rmds`, `mds++` and `rmds++` shrink their
covariances (oracle approximating shrinkage), `Mahalanobis` leaves out directions in which features do not vary, and the
principal space of `ViM` has at most half as many dimensions as there are images.
"""

CHOOSING = """
The table groups methods by what they read. Logits and features take one pass for an image, or K on an anchored network,
and `kedge.extract` stores them for all these methods at once; gradients also take a backward pass. No method is best
everywhere: [choosing.md](choosing.md) says which one to take when; measure some of different groups on your own images.

The section of each method has its cost: the passes through the network for an image, and, for methods that
pytorch-ood has too, the processor time of scoring, as a multiple of MSP's in the run of
[results.md](results.md#beside-pytorch-ood) (a small network, one thread). On a larger network the passes weigh more,
and what a method adds to them weighs less.
"""

OWN = """
Each of these prepares the network and has a loss of its own for `kedge.train`:

```python
net = kedge.train(kedge.DUQ.prepare(net), train_set, loss=kedge.DUQ.loss())
detector = kedge.DUQ(net).fit(train_set).calibrate(held_out)
```

Methods with outliers take them as `kedge.train(..., outliers=image_set)`.
"""


def page() -> str:
    """The whole page."""
    own = [kind for kind in registered().values() if issubclass(kind, TrainedDetector)]
    others = [kind for kind in registered().values() if kind not in (*own, *CONTROLS)]
    parts = [HEAD, "## Which to take", CHOOSING, table(registered().values())]
    parts += ["## On a trained network\n", *map(section, others)]
    parts += ["## With their own training", OWN, *map(section, own)]
    return "\n".join([*parts, "## Controls\n", *map(section, CONTROLS)])


def table(kinds: Iterable[type[Detector]]) -> str:
    """A row for each method: what it reads, the further names of its variants, what `fit` needs, when to use it."""
    rows = ["| reads | method | further names | needs | use it |", "|---|---|---|---|---|"]
    order = list(dict.fromkeys(GROUPS.values()))
    for kind in sorted(kinds, key=lambda kind: order.index(group(kind))):
        names = ", ".join(f"`{name}`" for name in kind.variants)
        link = f"[{kind.__name__}](#{kind.__name__.lower()})"
        rows.append(f"| {group(kind)} | {link} | {names} | {needs(kind)} | {use(kind)} |")
    return "\n".join([*rows, ""])


def group(kind: type[Detector]) -> str:
    """What a method reads, as the table says it."""
    return OWN_TRAINING if issubclass(kind, TrainedDetector) else GROUPS[kind.reads]


def needs(kind: type[Detector]) -> str:
    """What a method learns from, besides training images."""
    needed = {
        "labels": getattr(kind, "needs_labels", False),
        "outliers": kind.needs_outliers,
        "held-out images": kind.learns_held_out,
    }
    return ", ".join(name for name, needs_it in needed.items() if needs_it)


def use(kind: type[Detector]) -> str:
    """The sentence of a docstring that begins with "Use it", without these words."""
    found = re.search(r"Use it (.*?\.)(?=\s|$)", " ".join(inspect.getdoc(kind).split()))
    return found[1].replace("``", "`") if found else ""


def section(kind: type[Detector]) -> str:
    """A method: its name, its docstring before the arguments, and where its code is."""
    text = inspect.cleandoc(kind.__doc__ or "").split("\nArgs:")[0].split("\nExample:")[0].strip()
    summary, _, rest = text.partition("\n\n")
    file = Path(inspect.getfile(kind)).relative_to(Path(kedge.__file__).parent)
    link = f"[{file.name}](../src/kedge/{file})"
    last = f"`{call(kind)}` in {link}. Cost: {cost(kind)}.\n"
    parts = [f"### {kind.__name__}", f"**{' '.join(summary.split())}**", rest.strip(), last]
    return "\n\n".join(filter(None, parts)).replace("``", "`")


def cost(kind: type[Detector]) -> str:
    """The passes for an image, and the measured time of scoring as a multiple of MSP's."""
    words = inspect.getdoc(kind.cost).rstrip(".")
    rows = json.loads((Path(__file__).parent / "results" / "peers.json").read_text())["rows"]
    seconds = {row["name"].lower(): row["score"][0] for row in rows}
    own = seconds.get(kind.__name__.lower())
    return words[0].lower() + words[1:] + ("" if own is None else f"; {own / seconds['msp']:.1f} x MSP's time")


def call(kind: type[Detector]) -> str:
    """How to build a detector: the names of its arguments and their defaults."""
    given = [
        name if p.default is p.empty else f"{name}={p.default!r}"
        for name, p in inspect.signature(kind).parameters.items()
    ]
    return f"kedge.{kind.__name__}({', '.join(given)})"


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(page())
