"""The training loop: steps, epochs, validation and checkpoints."""

import contextlib
import itertools
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from kedge.anchoring import Anchored
from kedge.data import batches
from kedge.errors import FileFormatError, InputError, KedgeError, KedgeWarning
from kedge.files import remove_leftovers, write_json
from kedge.io.rebuild import describe
from kedge.io.schema import readable
from kedge.models.classifier import Classifier, evaluating
from kedge.provenance import provenance
from kedge.seeds import mix_seed
from kedge.training import checkpoint
from kedge.training.checkpoint import Position, RunHistory
from kedge.training.engine import Engine
from kedge.training.loader import OutlierLoader, TrainBatch, TrainLoader
from kedge.training.losses import Loss, Step
from kedge.training.optimizers import WeightAverage, make_optimizer
from kedge.training.recipes import Recipe

CHECKPOINT = "last.ckpt"
LISTED = 20  # skipped images in a warning; the record has all
LOSS_DRAWS = 1 << 32  # sets the seed of a loss's generator apart from the seeds of dropout, which end in a rank


@dataclass(frozen=True)
class Progress:
    """Progress after a step; loss and accuracy are running means over the epoch."""

    step: int
    steps: int
    epoch: int
    epochs: int
    loss: float
    accuracy: float
    images_per_second: float

    @property
    def note(self) -> str:
        """The progress in words, for a bar."""
        done = f"epoch {self.epoch}/{self.epochs}  loss {self.loss:.3f}  accuracy {self.accuracy:.1%}"
        return f"{done}  {self.images_per_second:,.0f} images/s"


class Trainer:
    """A training run and its state."""

    def __init__(
        self,
        net: Classifier,
        data: Any,
        loader: TrainLoader,
        outliers: OutlierLoader | None,
        loss: Loss,
        recipe: Recipe,
        seed: int,
        engine: Engine,
        directory: Path | None,
        tensorboard: bool,
    ) -> None:
        self.net, self.loader, self.recipe, self.seed, self.engine = net, loader, recipe, seed, engine
        self.data, self.outliers, self.loss = data, outliers, loss
        self.optimizer = make_optimizer(net, recipe, loader.preprocess.shape)
        if loader.preprocess.is_image:
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.module, self.stepper = engine.setup(net, self.optimizer)
        self.average = None if recipe.ema is None else WeightAverage(net, recipe.ema)
        self.position = Position()
        self.seen = 0  # images since this process started
        self.labels: set[int] = set()
        self.directory = directory
        self.history = RunHistory(directory if engine.rank == 0 else None, tensorboard)
        self.total = recipe.epochs * loader.steps
        described, earlier = describe(net), net.record
        # Data of earlier trainings, which the network has learned from too.
        self.before = [*earlier.get("before", ()), *([earlier["data"]] if "data" in earlier else [])]
        self.identity = {
            "recipe": json.loads(json.dumps(asdict(recipe))),
            "seed": seed,
            "data": {"name": loader.name, "images": loader.images, "sha256": loader.checksum},
            "loss": {"name": loss.name, **loss.config()},
            "outliers": outliers and {"name": outliers.name, "images": outliers.images, "sha256": outliers.checksum},
            "network": {key: described[key] for key in ("spec", "type", "anchored", "conversions")},
            "preprocess": loader.preprocess.as_record(),
            "processes": engine.world,
            **({"batch": loader.batch} if recipe.batch == "auto" else {}),
        }

    def run(
        self, resume: bool, checkpoint_seconds: float, validation: Any, progress: Callable[[Progress], None] | None
    ) -> None:
        """Train to the end, from the last checkpoint or from the start."""
        self._resume(resume)
        steps, position = self.loader.steps, self.position
        written = started = time.monotonic()
        before = position.seconds
        for epoch in range(position.step // steps, self.recipe.epochs):
            start = position.step % steps
            if start == 0:  # a checkpoint in mid-epoch restores what the loss computed then
                outlier_set = None if self.outliers is None else self.outliers.data
                self.loss.begin_epoch(self.net, self.data, outlier_set, self.loader.preprocess, epoch)
            self._training_mode()
            outlier_batches = itertools.repeat(None) if self.outliers is None else self.outliers.batches(position.step)
            for batch, outliers in zip(self.loader.epoch(epoch, start), outlier_batches, strict=False):
                self.step(batch, outliers, epoch)
                position.seconds = before + time.monotonic() - started
                if progress is not None and self.engine.rank == 0:
                    progress(self._progress(epoch, (position.seconds - before) or 1e-9))
                ended = position.step % steps == 0  # then `_end_epoch` writes the checkpoint, after the history
                if not ended and time.monotonic() - written > checkpoint_seconds:
                    self._checkpoint()
                    written = time.monotonic()
            self._end_epoch(epoch, validation)
            written = time.monotonic()
        if self.average is not None:
            self.average.apply(self.net)
        self.loss.finish(self.net)
        self.optimizer.zero_grad(set_to_none=True)
        if isinstance(self.net, Anchored):
            self.net.corrupting = True
        self._record()

    def step(self, batch: TrainBatch, outliers: tuple[Tensor, Tensor] | None, epoch: int) -> None:
        """Train on one batch. Seeds torch's global generator, for dropout."""
        net, position, steps = self.net, self.position, self.loader.steps
        if position.step % steps == 0:
            position.loss_sum, position.right, position.seen = 0.0, 0, 0
        torch.manual_seed(mix_seed(self.seed, position.step, self.engine.rank))
        for group in self.optimizer.param_groups:
            group["lr"] = group["scale"] * self.recipe.rate((position.step + 0.5) / steps)  # in the middle of the step
        y, among, anchors = batch.y.to(net.mean.device), batch.among.to(net.mean), {}
        if isinstance(net, Anchored):
            net.corrupting = position.step < (1 - self.recipe.clean_final_fraction) * self.total
            anchors = {"among": among, "first": batch.first}
        step = Step(
            net=net,
            forward=self.module,
            x=batch.x.to(net.mean),
            y=y,
            index=batch.index,
            outliers=None if outliers is None else outliers[0].to(net.mean),
            outlier_index=None if outliers is None else outliers[1],
            anchors=anchors,
            done=position.step / self.total,
            epoch=epoch,
            images=self.loader.images,
            label_smoothing=self.recipe.label_smoothing,
            among=among,
            first=batch.first,
            generator=torch.Generator().manual_seed(mix_seed(self.seed, position.step, LOSS_DRAWS)),
        )
        self.labels.update((int(y.min()), int(y.max())))
        result = self.loss.loss(step)
        self.stepper.zero_grad(set_to_none=True)
        self.engine.backward(result.value)
        right = (result.logits.detach().argmax(dim=1) == y).sum()
        sums = torch.stack([result.value.detach() * len(y), right, torch.tensor(len(y), device=y.device)]).double()
        loss_sum, right_sum, seen = self.engine.total(sums).tolist()
        if not math.isfinite(loss_sum):
            raise KedgeError(self._diverged("the loss", epoch))
        self.stepper.step()
        self.loss.after_step(step)
        position.step += 1
        if self.average is not None:
            self.average.update(net, position.step)
        position.loss_sum += loss_sum
        position.right += int(right_sum)
        position.seen += int(seen)
        self.seen += int(seen)

    def _training_mode(self) -> None:
        self.net.train()
        for module in self.net.modules() if self.recipe.freeze_norms else ():
            if isinstance(module, _BatchNorm):
                module.eval()

    def _diverged(self, what: str, epoch: int) -> str:
        exists = self.directory and (self.directory / CHECKPOINT).exists()
        where = f"; the last good checkpoint is {self.directory}/{CHECKPOINT}" if exists else ""
        return (
            f"{what} became NaN or infinite in epoch {epoch + 1}{where}. "
            f"Try a lower learning rate (lr={self.recipe.lr}), and check the images and labels"
        )

    def _progress(self, epoch: int, seconds: float) -> Progress:
        position, epochs = self.position, self.recipe.epochs
        loss, accuracy = position.loss_sum / position.seen, position.right / position.seen
        return Progress(position.step, self.total, epoch + 1, epochs, loss, accuracy, self.seen / seconds)

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
        skipped = int(self.engine.total(torch.tensor([float(len(self.skipped))])))
        if skipped:
            line["skipped"] = skipped
        if self.engine.rank == 0:
            self.history.add(line)
        self._checkpoint()

    @property
    def skipped(self) -> list[str]:
        """The images that this process could not decode, and why."""
        sets = (self.data, None if self.outliers is None else self.outliers.data)
        return [reason for each in sets for reason in getattr(each, "skipped", ())]

    def _validate(self, validation: Any) -> float:
        right = seen = 0
        with evaluating(self.net), torch.no_grad(), self._averaged():
            for x, y in batches(validation, self.loader.preprocess):
                if y is None:
                    raise InputError("validation must have labels to measure accuracy on; it has none")
                right += int((self.net(self.net.as_input(x)).argmax(dim=1).cpu() == y).sum())
                seen += len(y)
        return right / seen

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """Use the averaged weights inside the block, if there is an average."""
        if self.average is None:
            yield
            return
        current = WeightAverage(self.net, 0.0)
        try:
            self.average.apply(self.net)
            yield
        finally:
            current.apply(self.net)

    def _resume(self, resume: bool) -> None:
        if self.directory is None:
            return
        path = self.directory / CHECKPOINT
        if self.engine.rank == 0:
            remove_leftovers(self.directory)
            if not resume:
                path.unlink(missing_ok=True)
        self.engine.wait()
        if path.exists():
            average = None if self.average is None else self.average.values
            self.position, state = checkpoint.restore(path, self.net, self.optimizer, average, self.identity)
            with readable(path, "a checkpoint"):
                self.loss.load_state(state)
            if self.position.step > self.total:
                raise FileFormatError(f"{path} must be at most at step {self.total}; it is at {self.position.step}")
            self.history.resume(self.position.step // self.loader.steps)

    def _checkpoint(self) -> None:
        if not all(bool(torch.isfinite(p).all()) for p in self.net.parameters()):
            raise KedgeError(self._diverged("a weight", self.position.step // self.loader.steps))
        if self.directory is not None and self.engine.rank == 0:
            average = {} if self.average is None else self.average.values
            state = {"average": average, "loss": self.loss.state()}
            checkpoint.save(self.directory / CHECKPOINT, self.net, self.optimizer, state, self.position, self.identity)
        self.engine.wait()

    def _record(self) -> None:
        self.net.record = {
            **self.identity,
            "before": self.before,
            "epochs": self.recipe.epochs,
            "history": self.history.lines,
            "seconds": round(self.position.seconds, 1),
            "skipped": self.skipped,
            "made with": provenance(),
        }
        warn_skipped(self.skipped)
        if self.directory is not None and self.engine.rank == 0:
            write_json(self.directory / "record.json", self.net.record)


def warn_skipped(reasons: Sequence[str]) -> None:
    """List images that a training could not decode in a warning, if there are any."""
    if reasons:
        listed = "; ".join(reasons[:LISTED]) + ("; ..." if len(reasons) > LISTED else "")
        count = "1 image was" if len(reasons) == 1 else f"{len(reasons)} images were"
        warnings.warn(f"{count} skipped in training: {listed}", KedgeWarning, stacklevel=5)
