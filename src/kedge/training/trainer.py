"""A training under way: steps, epochs, checkpoints and the record of it."""

import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kedge.anchoring import Anchored
from kedge.data import batches
from kedge.errors import InputError, KedgeError
from kedge.files import atomic, remove_leftovers
from kedge.io.rebuild import describe
from kedge.models.classifier import Classifier, evaluating
from kedge.provenance import provenance
from kedge.seeds import mix_seed
from kedge.training import checkpoint
from kedge.training.average import Average
from kedge.training.checkpoint import Position
from kedge.training.engine import Engine
from kedge.training.history import History
from kedge.training.loader import Batch, TrainLoader
from kedge.training.losses import Loss, Step
from kedge.training.optimizer import make_optimizer
from kedge.training.outlier_loader import OutlierLoader
from kedge.training.recipe import Recipe

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


class Run:
    """A training under way."""

    def __init__(
        self,
        net: Classifier,
        data: Any,
        feed: TrainLoader,
        outliers: OutlierLoader | None,
        loss: Loss,
        recipe: Recipe,
        seed: int,
        engine: Engine,
        directory: str | Path | None,
        tensorboard: bool,
    ) -> None:
        self.net, self.feed, self.recipe, self.seed, self.engine = net, feed, recipe, seed, engine
        self.data, self.outliers, self.loss = data, outliers, loss
        self.optimizer = make_optimizer(net, recipe)
        if feed.preprocess.is_image:
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.module, self.stepper = engine.setup(net, self.optimizer)
        self.average = None if recipe.ema is None else Average(net, recipe.ema)
        self.position = Position()
        self.seen = 0  # images in this life of the run
        self.labels: set[int] = set()
        self.directory = None if directory is None else Path(directory)
        self.history = History(self.directory if engine.rank == 0 else None, tensorboard)
        self.total = recipe.epochs * feed.steps
        described, earlier = describe(net), net.record
        # What the network was trained on before: it has learned from that too.
        self.before = [*earlier.get("before", ()), *([earlier["data"]] if "data" in earlier else [])]
        self.identity = {
            "recipe": json.loads(json.dumps(asdict(recipe))),
            "seed": seed,
            "data": {"name": feed.name, "images": feed.images, "sha256": feed.checksum},
            "loss": {"name": loss.name, **loss.config()},
            "outliers": outliers and {"name": outliers.name, "images": outliers.images, "sha256": outliers.checksum},
            "network": {key: described[key] for key in ("spec", "type", "anchored", "conversions")},
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
        """Train from the last checkpoint, or from the beginning, to the end."""
        self._resume(resume)
        steps = self.feed.steps
        written = started = time.monotonic()
        before = self.position.seconds
        for epoch in range(self.position.step // steps, self.recipe.epochs):
            if self.position.step % steps == 0:  # in mid-epoch the checkpoint brings back what was seen then
                beside = None if self.outliers is None else self.outliers.data
                self.loss.begin_epoch(self.net, self.data, beside, self.feed.preprocess, epoch)
            self.net.train()
            beside_it = itertools.repeat(None) if self.outliers is None else self.outliers.batches(self.position.step)
            for batch, outliers in zip(self.feed.epoch(epoch, self.position.step % steps), beside_it):  # noqa: B905
                self.step(batch, outliers, epoch)
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
        self.optimizer.zero_grad(set_to_none=True)
        if isinstance(self.net, Anchored):
            self.net.corrupting = True
        self._record()

    def step(self, batch: Batch, outliers: tuple[Tensor, Tensor] | None, epoch: int) -> None:
        """Train on one batch; the random state of torch is the step's own afterwards."""
        position, steps = self.position, self.feed.steps
        if position.step % steps == 0:
            position.loss_sum, position.right, position.seen = 0.0, 0, 0
        torch.manual_seed(mix_seed(self.seed, position.step, self.engine.rank))  # for dropout
        for group in self.optimizer.param_groups:
            group["lr"] = group["scale"] * self.recipe.rate((position.step + 0.5) / steps)  # in the middle of the step
        device = self.net.mean.device
        y, anchored = batch.y.to(device), isinstance(self.net, Anchored)
        if isinstance(self.net, Anchored):
            self.net.corrupting = position.step < (1 - self.recipe.clean_final_fraction) * self.total
        step = Step(
            net=self.net,
            forward=self.module,
            x=batch.x.to(self.net.mean),
            y=y,
            index=batch.index,
            outliers=None if outliers is None else outliers[0].to(self.net.mean),
            outlier_index=None if outliers is None else outliers[1],
            anchors={"among": batch.among.to(self.net.mean), "first": batch.first} if anchored else {},
            done=position.step / self.total,
            epoch=epoch,
            images=self.feed.images,
            label_smoothing=self.recipe.label_smoothing,
            generator=torch.Generator().manual_seed(mix_seed(self.seed, position.step)),
        )
        self.labels.update((int(y.min()), int(y.max())))
        made = self.loss.loss(step)
        loss, logits = made.value, made.logits
        self.stepper.zero_grad(set_to_none=True)
        self.engine.backward(loss)
        right = (logits.detach().argmax(dim=1) == y).sum()
        sums = torch.stack([loss.detach() * len(y), right, torch.tensor(len(y), device=device)]).double()
        loss_sum, right_sum, seen = self.engine.total(sums).tolist()
        if not math.isfinite(loss_sum):
            raise KedgeError(self._diverged("the loss", epoch))
        self.stepper.step()
        self.loss.after_step(step)
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
            "lr": self.optimizer.param_groups[0]["lr"],
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
                right += int((self.net(self.net.as_input(x)).argmax(dim=1).cpu() == y).sum())
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
            self.position, state = checkpoint.restore(path, self.net, self.optimizer, average, self.identity)
            self.loss.load_state(state)
            self.history.resume(self.position.step // self.feed.steps)

    def _checkpoint(self) -> None:
        if not all(bool(torch.isfinite(p).all()) for p in self.net.parameters()):
            raise KedgeError(self._diverged("a weight", self.position.step // self.feed.steps))
        if self.directory is not None and self.engine.rank == 0:
            average = None if self.average is None else self.average.values
            path = self.directory / CHECKPOINT
            state = self.loss.state()
            checkpoint.save(path, self.net, self.optimizer, average, state, self.position, self.identity)
        self.engine.wait()

    def _record(self) -> None:
        self.net.record = {
            **self.identity,
            "before": self.before,
            "epochs": self.recipe.epochs,
            "history": self.history.lines,
            "seconds": round(self.position.seconds, 1),
            "made with": provenance(),
        }
        if self.directory is not None and self.engine.rank == 0:
            with atomic(self.directory / "record.json") as temporary:
                temporary.write_text(json.dumps(self.net.record, indent=1))
