"""One training loop for plain and anchored networks, so that comparisons between them are fair."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kedge.anchoring import DEFAULT_K, Anchored
from kedge.anchoring.rebuild import describe
from kedge.data import Preprocess, batches, choose
from kedge.errors import InputError, KedgeError
from kedge.files import atomic, remove_leftovers
from kedge.models.classifier import Classifier, evaluating
from kedge.provenance import provenance
from kedge.training import checkpoint
from kedge.training.average import Average
from kedge.training.checkpoint import Position
from kedge.training.engine import Engine, make_engine
from kedge.training.feed import Batch, Feed, make_feed
from kedge.training.history import History
from kedge.training.recipe import Recipe
from kedge.training.recipe import recipe as named_recipe
from kedge.training.statistics import statistics
from kedge.transforms import mix_seed

CHECKPOINT = "last.ckpt"


@dataclass(frozen=True)
class Progress:
    """Where training stands after a step; loss and accuracy are running means over the epoch."""

    step: int
    steps: int
    epoch: int
    epochs: int
    loss: float
    accuracy: float
    images_per_second: float


def train(
    net: nn.Module,
    data: Any,
    recipe: str | Recipe = "fast",
    *,
    seed: int = 0,
    directory: str | Path | None = None,
    resume: bool = True,
    checkpoint_seconds: float = 120.0,
    validation: Any = None,
    preprocess: Preprocess | None = None,
    workers: int = 0,
    devices: int = 1,
    nodes: int = 1,
    accelerator: str = "auto",
    precision: str | None = None,
    tensorboard: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Classifier:
    """Train a network in place, plain or anchored, and return it as a `Classifier` in evaluation mode.

    Normalisation statistics and evaluation anchors that are not set yet are taken from the training images. With a
    ``directory`` the run can be stopped at any moment, even by a crash, and started again with the same call: it goes
    on from the last checkpoint and ends with the very same weights.

    Args:
        net: A network, a `Classifier` or an `Anchored` network.
        data: Labelled images: an `ImageSet`, a data set of (image, label) pairs, or a data loader of such batches.
        recipe: A name or a `Recipe`.
        seed: Of the order of images, augmentation and dropout; an `Anchored` network has its own for its anchors.
        directory: For checkpoints, history.jsonl and record.json.
        resume: Whether to go on from a checkpoint in ``directory``; otherwise it is overwritten.
        checkpoint_seconds: Write a checkpoint this often, besides after every epoch.
        validation: Labelled images on which to measure accuracy after every epoch.
        preprocess: For data sets of PIL images or paths: what the network takes.
        workers: Processes that read a data set.
        devices: On this machine; above 1, and under torchrun, training runs in parallel through Lightning Fabric.
        nodes: Machines.
        accelerator: As Fabric names it: "cpu", "gpu", ...; "auto" with one device stays where the network is.
        precision: As Fabric names it: "bf16-mixed", "16-mixed", ...
        tensorboard: Whether to write the history for TensorBoard too, into ``directory``.
        progress: Called after every step.

    Example:
        >>> from kedge import ImageSet
        >>> from kedge.models import build
        >>> images = ImageSet(torch.randint(0, 256, (64, 1, 8, 8), dtype=torch.uint8), torch.arange(64) % 2)
        >>> net = train(build("compact", width=4, classes=2, channels=1), images, named_recipe("demo", epochs=1))
        >>> net.record["epochs"]
        1
    """
    chosen = named_recipe(recipe)
    if tensorboard and directory is None:
        raise InputError("tensorboard needs a directory to write to; pass directory=")
    engine = make_engine(devices, nodes, accelerator, precision)
    feed = make_feed(data, chosen, seed, rank=engine.rank, world=engine.world, workers=workers, preprocess=preprocess)
    classifier = net if isinstance(net, Classifier) else Classifier(net)
    with torch.random.fork_rng():  # dropout draws from torch's own generators, which are put back afterwards
        _prepare(classifier, data, feed, seed)
        run = _Run(classifier, feed, chosen, seed, engine, directory, tensorboard)
        run.go(resume, checkpoint_seconds, validation, progress)
    classifier.eval()
    return classifier


class _Run:
    """A training under way."""

    def __init__(
        self,
        net: Classifier,
        feed: Feed,
        recipe: Recipe,
        seed: int,
        engine: Engine,
        directory: str | Path | None,
        tensorboard: bool,
    ) -> None:
        self.net, self.feed, self.recipe, self.seed, self.engine = net, feed, recipe, seed, engine
        self.optimiser = torch.optim.SGD(
            net.parameters(),
            lr=recipe.lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            nesterov=recipe.nesterov,
        )
        if feed.preprocess.is_image:
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.module, self.stepper = engine.setup(net, self.optimiser)
        self.average = None if recipe.ema is None else Average(net, recipe.ema)
        self.position = Position()
        self.seen = 0  # images in this life of the run
        self.labels: set[int] = set()
        self.directory = None if directory is None else Path(directory)
        self.history = History(self.directory if engine.rank == 0 else None, tensorboard)
        self.total = recipe.epochs * feed.steps
        described = describe(net)
        self.identity = {
            "recipe": json.loads(json.dumps(asdict(recipe))),
            "seed": seed,
            "data": {"name": feed.name, "images": feed.images, "sha256": feed.checksum},
            "network": {key: described[key] for key in ("spec", "type", "anchored")},
            "preprocess": json.loads(json.dumps(asdict(feed.preprocess))),
            "processes": engine.world,
        }

    def go(
        self,
        resume: bool,
        checkpoint_seconds: float,
        validation: Any,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._resume(resume)
        steps = self.feed.steps
        written = started = time.monotonic()
        before = self.position.seconds
        for epoch in range(self.position.step // steps, self.recipe.epochs):
            self.net.train()
            for batch in self.feed.epoch(epoch, self.position.step % steps):
                self._step(batch, epoch)
                position = self.position
                position.seconds = before + time.monotonic() - started
                if progress is not None and self.engine.rank == 0:
                    progress(self._progress(epoch, (position.seconds - before) or 1e-9))
                ended = position.step % steps == 0  # then the epoch's own checkpoint follows, after its history
                if not ended and time.monotonic() - written > checkpoint_seconds:
                    self._checkpoint()
                    written = time.monotonic()
            self._end_epoch(epoch, validation)
            written = time.monotonic()
        if self.average is not None:
            self.average.apply(self.net)
        self._record()

    def _step(self, batch: Batch, epoch: int) -> None:
        position, steps = self.position, self.feed.steps
        if position.step % steps == 0:
            position.loss_sum, position.right, position.seen = 0.0, 0, 0
        torch.manual_seed(mix_seed(self.seed, position.step, self.engine.rank))  # for dropout
        for group in self.optimiser.param_groups:
            group["lr"] = self.recipe.rate((position.step + 0.5) / steps)  # in the middle of the step
        device = self.net.mean.device
        x, y = batch.x.to(self.net.mean), batch.y.to(device)
        if isinstance(self.net, Anchored):
            logits = self.module(x, among=batch.among.to(self.net.mean), first=batch.first)
            target = self.net.targets(y) if self.net.options.mask > 0 else y
        else:
            logits, target = self.module(x), y
        self.labels.update((int(y.min()), int(y.max())))
        if int(y.max()) >= logits.shape[1] or int(y.min()) < 0:
            raise InputError(
                f"labels must lie in 0..{logits.shape[1] - 1}, since the network has {logits.shape[1]} outputs; got "
                f"{int(y.min())}..{int(y.max())}: build the network with classes={int(y.max()) + 1}, or number from 0"
            )
        loss = F.cross_entropy(logits, target, label_smoothing=self.recipe.label_smoothing)
        self.stepper.zero_grad(set_to_none=True)
        self.engine.backward(loss)
        right = (logits.detach().argmax(dim=1) == y).sum()
        sums = torch.stack([loss.detach() * len(y), right, torch.tensor(len(y), device=device)]).double()
        loss_sum, right_sum, seen = self.engine.total(sums).tolist()
        if not math.isfinite(loss_sum):
            raise KedgeError(self._diverged("the loss", epoch))
        self.stepper.step()
        if self.average is not None:
            self.average.update(self.net)
        position.step += 1
        position.loss_sum += loss_sum
        position.right += int(right_sum)
        position.seen += int(seen)
        self.seen += int(seen)

    def _diverged(self, what: str, epoch: int) -> str:
        kept = self.directory and (self.directory / CHECKPOINT).exists()
        where = f"; the last good checkpoint is {self.directory}/{CHECKPOINT}" if kept else ""
        return (
            f"{what} became NaN or infinite in epoch {epoch + 1}{where}. "
            f"Try a lower learning rate (lr={self.recipe.lr}), and check the images and labels"
        )

    def _progress(self, epoch: int, seconds: float) -> Progress:
        position = self.position
        return Progress(
            step=position.step,
            steps=self.total,
            epoch=epoch + 1,
            epochs=self.recipe.epochs,
            loss=position.loss_sum / position.seen,
            accuracy=position.right / position.seen,
            images_per_second=self.seen / seconds,
        )

    def _end_epoch(self, epoch: int, validation: Any) -> None:
        position = self.position
        line = {
            "epoch": epoch + 1,
            "step": position.step,
            "loss": position.loss_sum / position.seen,
            "accuracy": position.right / position.seen,
            "lr": self.optimiser.param_groups[0]["lr"],
            "seconds": round(position.seconds, 3),
        }
        if len(self.labels) == 1 and self.engine.world == 1:
            raise InputError(f"labels must be of at least two classes; every image has {self.labels.pop()}")
        if validation is not None:
            line["validation_accuracy"] = self._validate(validation)
        if self.engine.rank == 0:
            self.history.add(line)
        self._checkpoint()

    def _validate(self, validation: Any) -> float:
        right = seen = 0
        with evaluating(self.net), torch.no_grad(), self._averaged():
            for x, y in batches(validation, self.feed.preprocess):
                if y is None:
                    raise InputError("validation must have labels to measure accuracy on; it has none")
                right += int((self.net(x.to(self.net.mean.device)).argmax(dim=1).cpu() == y).sum())
                seen += len(y)
        return right / seen

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """The averaged weights inside the block, where there is an average."""
        if self.average is None:
            yield
            return
        kept = Average(self.net, 0.0)
        try:
            self.average.apply(self.net)
            yield
        finally:
            kept.apply(self.net)

    def _resume(self, resume: bool) -> None:
        path = None if self.directory is None else self.directory / CHECKPOINT
        if self.directory is not None and self.engine.rank == 0:
            remove_leftovers(self.directory)
            if not resume:
                (self.directory / CHECKPOINT).unlink(missing_ok=True)
        self.engine.wait()
        if path is not None and path.exists():
            average = None if self.average is None else self.average.values
            self.position = checkpoint.restore(path, self.net, self.optimiser, average, self.identity)
            self.history.resume(self.position.step // self.feed.steps)

    def _checkpoint(self) -> None:
        if not all(bool(torch.isfinite(p).all()) for p in self.net.parameters()):
            raise KedgeError(self._diverged("a weight", self.position.step // self.feed.steps))
        if self.directory is not None and self.engine.rank == 0:
            average = None if self.average is None else self.average.values
            path = self.directory / CHECKPOINT
            checkpoint.save(path, self.net, self.optimiser, average, self.position, self.identity)
        self.engine.wait()

    def _record(self) -> None:
        self.net.record = {
            **self.identity,
            "epochs": self.recipe.epochs,
            "history": self.history.lines,
            "seconds": round(self.position.seconds, 1),
            "made with": provenance(),
        }
        if self.directory is not None and self.engine.rank == 0:
            with atomic(self.directory / "record.json") as temporary:
                temporary.write_text(json.dumps(self.net.record, indent=1))


def _prepare(net: Classifier, data: Any, feed: Feed, seed: int) -> None:
    """Set what is absent from the training images."""
    torch.manual_seed(mix_seed(seed))  # for random transforms of a data set's own
    if not net.has_statistics:
        net.set_statistics(*statistics(data, feed.preprocess, seed=seed))
    if isinstance(net, Anchored) and net.anchors is None:
        net.set_anchors(choose(data, feed.preprocess, DEFAULT_K, "random", seed))
