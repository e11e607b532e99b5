"""``kedge extract``: one pass of a network over images, for any number of detectors."""

from pathlib import Path
from typing import Annotated

import typer

from kedge.cli.options import AS_IT_IS, Batch, DataDir, Half, Network, NetworkOptions, Overwrite, Split, Threads
from kedge.cli.terminal import Console
from kedge.files import check_target
from kedge.threads import use_threads


def extract(
    network: Network,
    data: Annotated[str, typer.Option(help="Images: a data set by name, folder:PATH, npz:PATH or list:PATH.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the features.")],
    split: Split = None,
    head: Annotated[
        str | None, typer.Option(help="Name of the last linear layer; by default it is found by running the network.")
    ] = None,
    half: Half = False,
    batch: Batch = None,
    given: NetworkOptions = AS_IT_IS,
    overwrite: Overwrite = False,
    threads: Threads = None,
    data_dir: DataDir = None,
) -> None:
    """Store a network's logits and last features of images, for detectors that read nothing else.

    If stopped, the same command resumes; --overwrite begins anew. `kedge compare` and `kedge evaluate` take the
    folder as features:FOLDER.

    For example:

        kedge extract timm:resnet50 --data folder:photos/train -o features/train

        kedge extract birds.kedge --data folder:new/ -o features/new --half
    """
    from kedge import detectors
    from kedge.cli.inputs import open_images, open_network
    from kedge.data.features import MANIFEST, read_manifest

    check_target("--out", out, folder=True)
    manifest = out / MANIFEST
    if manifest.exists() and not overwrite and (begun := read_manifest(out))["done"] == begun["images"]:
        check_target("--out", manifest, overwrite=False)
    use_threads(threads)
    console = Console()
    console.resumable(manifest, begun=manifest.exists() and not overwrite)
    images = open_images("--data", data, split, data_dir=data_dir)
    net = open_network(network, images, given)
    if overwrite:
        manifest.unlink(missing_ok=True)
    features = detectors.extract(net, images, out, head=head, half=half, batch_size=batch)
    outputs, width = features.logits.shape[1], features.features.shape[1]
    console.print(f"{len(features):,} images, {outputs:,} logits and {width:,} features of each")
    console.wrote("features", out)
    console.next(f"kedge compare {network} --train features:{out} --held-out IMAGES --ood IMAGES")
