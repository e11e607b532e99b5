"""The cost of the default detector: a verdict against a forward pass, and `fit` against a pass over its images.

    python benchmarks/default.py [--network NAME] [--side 160] [--images 512] [--repeats 9] [--threads 1]

Both pairs are timed in turns, so that other load on the machine affects all alike. Printed are the median and the
quartiles, over turns, of the ratio. The weights and the images are random: neither changes the time. The pass over the
training images reads them in the same batches as `fit`.
"""

import argparse
from typing import Any

import torch

import kedge
from kedge.data import ImageSet, Preprocess, batches
from kedge.detectors.registry import make
from kedge.models.classifier import evaluating
from kedge.studies.bench.turns import in_turns, ratios
from kedge.threads import keep_freed_memory, use_threads


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="timm:efficientnet_lite0", help="a name that kedge.network takes")
    parser.add_argument("--side", type=int, default=160, help="of the images, in pixels")
    parser.add_argument("--classes", type=int, default=50)
    parser.add_argument("--method", default="default", help="a method, or several with commas between")
    parser.add_argument("--batch", type=int, default=32, help="images of a verdict")
    parser.add_argument("--images", type=int, default=512, help="training images")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.network.startswith("timm:"):
        import torchvision_ops  # noqa: F401 -- before timm, which imports torchvision
    use_threads(options.threads)
    keep_freed_memory()  # as the command line does
    net = kedge.network(options.network, classes=options.classes, pretrained=False)
    generator = torch.Generator().manual_seed(0)
    preprocess = Preprocess((3, options.side, options.side))
    shape = (options.images + 100 + options.batch, *preprocess.shape)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    train = ImageSet(pixels[: options.images], torch.arange(options.images) % options.classes)
    detector = make(options.method, net).fit(train, preprocess=preprocess)
    detector.calibrate(pixels[options.images : -options.batch])
    x = pixels[-options.batch :].float() / 255

    @torch.no_grad()
    def forward() -> Any:
        with evaluating(net):
            return net(x)

    @torch.no_grad()
    def read() -> None:
        with evaluating(net):
            for images, _ in batches(train, preprocess):
                net(net.as_input(images))

    verdict = in_turns({"verdict": lambda: detector(x), "forward": forward}, repeats=options.repeats)
    ways = {"fit": lambda: make(options.method, net).fit(train, preprocess=preprocess), "pass": read}
    fitting = in_turns(ways, repeats=options.repeats)
    for title, times, base in (
        (f"a verdict, batch {options.batch}, to a forward pass", verdict["verdict"], verdict["forward"]),
        (f"fit, {options.images:,} images, to a pass over them", fitting["fit"], fitting["pass"]),
    ):
        ratio = ratios(times, base)
        print(f"{title}: {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})")


if __name__ == "__main__":
    main()
