"""OpenOOD v1.5: post-hoc methods on its four benchmarks, read by its image lists, beside its leaderboard."""

import inspect
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from kedge.data import ImageSet, Preprocess, StreamedSet, gather, sources
from kedge.data.leakage import fingerprints, shared
from kedge.data.sources.photographs import OPENOOD_CLASSIC as CLASSIC
from kedge.data.sources.photographs import OPENOOD_LARGE as LARGE
from kedge.data.sources.photographs import OPENOOD_LISTS as LISTS
from kedge.data.sources.photographs import read_openood
from kedge.detectors import AMP, Energy
from kedge.detectors.registry import post_hoc
from kedge.errors import InputError, NotReadyError
from kedge.studies import sets
from kedge.studies.leaderboard import leaderboard_methods
from kedge.studies.plan import Board, MethodPlan, Need, NetworkPlan, Protocol, Sets, SuiteData, Weights
from kedge.studies.study import SMALL_OOD, SMALL_TEST, SMOKE_IMAGES, SMOKE_SIDE, Setting, Study, smoke_data, some
from kedge.training import Recipe, recipe

SMALL_TRAIN, SMALL_SIDE = 50_000, 32  # at the small scale, where the network is kedge's compact one
AS_THEY_ARE = ("imagenet_c",)  # shifted sets whose images have the network's size already
IMAGENET_STATISTICS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
IMAGES = {  # in OpenOOD's lists, by benchmark where they differ
    "train_cifar10": 50_000, "val_cifar10": 1_000, "test_cifar10": 9_000, "train_cifar100": 50_000,
    "val_cifar100": 1_000, "test_cifar100": 9_000, "train_imagenet200": 258_951, "val_imagenet200": 1_000,
    "test_imagenet200": 9_000, "train_imagenet": 1_281_167, "val_imagenet": 5_000, "test_imagenet": 45_000,
    "cifar10 test_tin": 7_793, "cifar100 test_tin": 6_526, "val_tin": 1_000, "test_mnist": 70_000,
    "test_svhn": 26_032, "test_texture": 5_640, "cifar10 test_places365": 35_195, "cifar100 test_places365": 33_773,
    "test_cifar10c": 10_000, "test_ssb_hard": 49_000, "test_ninco": 5_879, "test_inaturalist": 10_000,
    "test_textures": 5_160, "test_openimage_o": 15_869, "val_openimage_o": 1_763, "test_imagenet_v2": 10_000,
    "test_imagenet_c": 10_000, "test_imagenet_r": 30_000, "test_imagenet200_v2": 2_000, "test_imagenet200_c": 10_000,
    "test_imagenet200_r": 30_000,
}  # fmt: skip
CIFAR_RECIPE = Recipe(epochs=100, nesterov=True, schedule="linear")


@dataclass(frozen=True)
class Benchmark:
    """One in-distribution set of OpenOOD, with its image lists and its network.

    Args:
        classes: Number of classes.
        network: A name for `kedge.models.build`.
        board: The network's name on the leaderboard.
        recipe: Its training, where no weights are given.
        statistics: Mean and deviation of the images that its weights expect.
        near: Names of the near OOD sets; the list of each is ``test_NAME.txt``.
        far: Names of the far OOD sets.
        validation: The name of the OOD validation set; its list is ``val_NAME.txt``.
        shifted: By name, the lists of the sets of known classes in other conditions.
        side: Height and width of the inputs.
        crop: Share of the scaled image that the central crop keeps.
    """

    classes: int
    network: str
    board: str
    recipe: Recipe
    statistics: tuple[tuple[float, ...], tuple[float, ...]]
    near: tuple[str, ...]
    far: tuple[str, ...]
    validation: str
    shifted: dict[str, str]
    side: int = 32
    crop: float = 1.0


_CIFAR = partial(
    Benchmark, network="resnet18-cifar", board="ResNet18", recipe=CIFAR_RECIPE, validation="tin",
    far=("mnist", "svhn", "texture", "places365"),
)  # fmt: skip
_IMAGENET = partial(
    Benchmark, statistics=IMAGENET_STATISTICS, near=("ssb_hard", "ninco"), validation="openimage_o",
    far=("inaturalist", "textures", "openimage_o"), side=224, crop=224 / 256,
)  # fmt: skip
BENCHMARKS = {
    "cifar10": _CIFAR(
        10,
        statistics=((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        near=("cifar100", "tin"),
        shifted={"cifar10c": "test_cifar10c"},
    ),
    "cifar100": _CIFAR(
        100, statistics=((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)), near=("cifar10", "tin"), shifted={}
    ),
    "imagenet200": _IMAGENET(
        200,
        network="resnet18",
        board="ResNet18",
        recipe=Recipe(epochs=90, batch=256, nesterov=True, schedule="linear", crop=0, resized_crop=True),
        shifted={f"imagenet_{kind}": f"test_imagenet200_{kind}" for kind in ("v2", "c", "r")},
    ),
    "imagenet": _IMAGENET(
        1000,
        network="resnet50",
        board="ResNet50",
        recipe=recipe("imagenet", epochs=90, batch=256, milestones=(30, 60)),
        shifted={f"imagenet_{kind}": f"test_imagenet_{kind}" for kind in ("v2", "c", "r")},
    ),
}


def openood(known: str, setting: Setting) -> Study:
    """A benchmark of OpenOOD v1.5 with every post-hoc method of kedge; AMP too where networks are trained."""
    benchmark, classes = BENCHMARKS[known], BENCHMARKS[known].classes
    smoke = setting.scale == "smoke"
    if setting.weights:
        weights = Weights(setting.weights, *benchmark.statistics)
        plan = NetworkPlan(benchmark.network, benchmark.recipe, {"classes": classes}, weights=weights)
        networks = {"unanchored": plan}
    elif setting.scale == "full":
        networks = {
            name: NetworkPlan(benchmark.network, benchmark.recipe, {"classes": classes}, anchored=name == "anchored")
            for name in ("unanchored", "anchored")
        }
    else:
        networks = setting.networks(benchmark.network, classes)
    methods = _rows()
    if "anchored" in networks:
        methods |= {f"{kind.__name__} (anchored)": MethodPlan(kind, ("anchored",)) for kind in (AMP, Energy)}
    suite = setting.suite(
        known,
        f"OpenOOD v1.5, {known}",
        networks=networks,
        methods=methods,
        data=_smoke if smoke else _data(setting, known),
        protocol=Protocol(("auroc", "fpr95_ood", "aupr_in", "aupr_out")),
        groups={"near": ("toy noise",), "far": ("toy clouds",)} if smoke else _groups(benchmark),
        board=None if smoke else Board(known, benchmark.board),
        extract=True,
    )
    about = "Near OOD sets show other classes of the same kind of images, far OOD sets other kinds of images."
    return Study(f"openood-{known}", f"OpenOOD v1.5, {known}", about, (suite,))


def _rows() -> dict[str, MethodPlan]:
    """A row for each method that reads one unanchored network as it is, and one more with outliers for some."""
    on_board = {method: name for name, method in leaderboard_methods().items()}
    methods = post_hoc(unanchored=True)
    rows = {
        kind.__name__ if name == kind.name else name: MethodPlan(
            kind, ("unanchored",), options, paper=on_board.get(name)
        )
        for name, (kind, options) in methods.items()
    }
    kinds = dict.fromkeys(kind for kind, _ in methods.values())
    taking = [kind for kind in kinds if "outliers" in inspect.signature(kind).parameters]
    return rows | {f"{kind.__name__}*": MethodPlan(kind, ("unanchored",), outliers=True) for kind in taking}


def _groups(benchmark: Benchmark) -> dict[str, tuple[str, ...]]:
    return {"near": benchmark.near, "far": benchmark.far}


def _smoke(seed: int) -> SuiteData:
    shifted = sets.toy_images(SMOKE_IMAGES, "toy shifted", side=SMOKE_SIDE, seed=seed)
    return replace(smoke_data(seed, outliers=True), shifted=(shifted,))


def _data(setting: Setting, known: str) -> Sets:
    """OpenOOD's lists, the same for every seed: training, validation and test images, OOD sets and shifted sets."""
    benchmark, small = BENCHMARKS[known], setting.scale == "small"
    compact = small and not setting.weights
    shape = (3, SMALL_SIDE, SMALL_SIDE) if compact else (3, benchmark.side, benchmark.side)
    whole = Preprocess(shape, resize="bilinear", background=None)
    cropped = Preprocess(shape, resize="bilinear", background=None, crop=benchmark.crop)

    def load(seed: int) -> SuiteData:
        home = openood_folder(setting.data_dir)
        missing: dict[str, str] = {}

        def listed(stem: str, most: int) -> StreamedSet:
            images = openood_list(home, known, stem)
            return some(images, most) if small else images

        def read(stem: str, most: int, name: str) -> ImageSet:
            how = whole if name in AS_THEY_ARE else cropped
            return sets.small_or_on_disk(listed(stem, most), how, setting.pixels, name=name)

        def found(lists: dict[str, str]) -> tuple[ImageSet, ...]:
            loaded = []
            for name, stem in lists.items():
                try:
                    loaded.append(read(stem, SMALL_OOD, name))
                except NotReadyError as error:
                    missing[name] = str(error)
            return tuple(loaded)

        streamed = listed(f"train_{known}", SMALL_TRAIN)
        train = gather(streamed, cropped, name=streamed.name) if shape[1] <= SMALL_SIDE else streamed
        test = read(f"test_{known}", SMALL_TEST, known)
        ood = found({name: f"test_{name}" for name in (*benchmark.near, *benchmark.far)})
        shifted = found(benchmark.shifted)
        outliers = found({f"{benchmark.validation} validation": f"val_{benchmark.validation}"})
        held_out = _without(read(f"val_{known}", SMALL_TEST, f"{known} validation"), (test, *ood, *shifted))
        return SuiteData(
            train, held_out, test, ood, next(iter(outliers), None), shifted, missing=missing, preprocess=cropped
        )

    def need(role: str, stem: str, most: int) -> Need:
        count = IMAGES.get(f"{known} {stem}") or IMAGES[stem]
        find = partial(_listed, setting.data_dir, known, stem)
        return Need(role, f"openood {stem}", min(count, most) if small else count, find)

    needs = (
        need("train", f"train_{known}", SMALL_TRAIN),
        need("held out", f"val_{known}", SMALL_TEST),
        need("test", f"test_{known}", SMALL_TEST),
        *(need("ood", f"test_{name}", SMALL_OOD) for name in (*benchmark.near, *benchmark.far)),
        *(need("test", stem, SMALL_OOD) for stem in benchmark.shifted.values()),
        need("outliers", f"val_{benchmark.validation}", SMALL_OOD),
    )
    return Sets(load, needs, shape, streamed=shape[1] > SMALL_SIDE)


def _listed(data_dir: Path | None, known: str, stem: str) -> StreamedSet:
    return openood_list(openood_folder(data_dir), known, stem)


def _without(images: ImageSet, others: tuple[ImageSet, ...]) -> ImageSet:
    """A set without the images that are in another set too: an image that is tested must not be calibrated on."""
    kept = torch.ones(len(images), dtype=torch.bool)
    for other in others:
        kept[shared(fingerprints(other.images), fingerprints(images.images))] = False
    return images.subset(kept)


def openood_folder(data_dir: Path | None) -> Path:
    """The folder with OpenOOD's lists and images: the data folder, or ``openood`` in it."""
    folder = sources.data_folder(data_dir)
    home = next((at for at in (folder / "openood", folder) if (at / LISTS).is_dir()), None)
    if home is None:
        raise NotReadyError(
            f"OpenOOD's lists are not in {folder}: put the folders {LISTS}, {CLASSIC} and {LARGE} there, as its "
            "scripts/download/download.py writes them, or pass --data-dir with its data folder"
        )
    return home


def openood_list(home: Path, benchmark: str, stem: str) -> StreamedSet:
    """The images of one of OpenOOD's lists, on disk.

    Args:
        home: OpenOOD's data folder, with ``benchmark_imglist``, ``images_classic`` and ``images_largescale``.
        benchmark: One of `BENCHMARKS`.
        stem: The list's name without its ending, such as ``"test_tin"``.
    """
    path = home / LISTS / benchmark / f"{stem}.txt"
    if not path.is_file():
        raise NotReadyError(f"OpenOOD's list {path} is not here: download {LISTS} again")
    try:
        return read_openood(path, stem, f"{benchmark} {stem}")
    except InputError as error:
        raise NotReadyError(f"OpenOOD's images are not complete: {error}") from error
