"""Lists of images, archives, and the files of public data sets."""

import gzip
import io
import os
import pickle
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np

from fuzzing.damage import any_of, damaged
from fuzzing.engine import Cases, target
from fuzzing.images import FILES, pixels
from kedge.data import sources
from kedge.data.sources import archive, arrays, image_list, scood_parts
from kedge.data.sources.cifar import unpickle
from kedge.data.sources.svhn import read_svhn
from kedge.scoring import plan

HOSTILE_NAMES = (
    "../x", "../../x", "/x", "data/../../x", "..", ".", "", "data", "data/..", "data\\..\\..\\x", "C:x", "data/a:b",
    "data/\0x", "data/link/x", "link/x", "data/\ud800", "data/" + "d" * 300, "data/" + "e/" * 100 + "x", "data/a",
    "data/b/c", "~/x", "data/\x1b[2J", "data/=1+1", "secret", "../secret",
)  # fmt: skip


@target("list")
def list_cases(home) -> Cases:
    root = home / "images"
    root.mkdir()
    names = [f"{number}.png" for number in range(4)]
    for name in names:
        (root / name).write_bytes(FILES[0])
    parts = (
        *names,
        *HOSTILE_NAMES,
        "-1",
        "3",
        "9" * 400,
        str(2**70),
        "-" + "9" * 30,
        "\xb2",
        "1e3",
        "{}",
        "\t",
        "  ",
        "#",
    )
    parts += (
        '{"sc_label": 1}',
        '{"sc_label": 1e999}',
        '{"sc_label": ' + "9" * 40 + "}",
        "[" * 3000,
        '{"sc_label": true}',
    )

    def case(rng, folder):
        rows = [f"{any_of(rng, names)} {rng.integers(-1, 9)}" for _ in range(rng.integers(6))]
        scood_rows = [f'{any_of(rng, names)} {{"sc_label": {rng.integers(-1, 9)}}}' for _ in range(rng.integers(6))]
        lines = any_of(rng, (rows, scood_rows, list(names)))
        for _ in range(rng.integers(3)):
            words = [any_of(rng, parts) for _ in range(rng.integers(1, 4))]
            lines.insert(int(rng.integers(len(lines) + 1)), any_of(rng, (" ", "", "\x0b", "\n")).join(words))
        text = "\n".join(lines).encode("utf-8", "surrogatepass")
        text = damaged(rng, text) if rng.random() < 0.3 else text
        home = folder / "imglist" / "benchmark_cifar10"
        home.mkdir(parents=True)
        (folder / "images").symlink_to(root)
        listed = home / "test_x.txt"
        listed.write_bytes(text)
        how = rng.integers(3)
        if how == 2:
            return bool([shard.names() for shard in plan([listed])])
        for found in scood_parts("cifar10", "x", data_dir=folder) if how else [image_list(listed, root)]:
            assert len(found) == len(found.labels)
            assert bool((found.labels >= -1).all())
            assert all(Path(root, name).resolve().is_relative_to(root) for name in found.store.names)
        return True

    yield case


def hostile_tar(rng, outside) -> bytes:
    """A tar of members of every type and name; some lead out of the folder, and some go through these."""
    target = io.BytesIO()
    pax = tarfile.PAX_FORMAT if rng.random() < 0.5 else tarfile.GNU_FORMAT
    types = (
        tarfile.REGTYPE,
        tarfile.DIRTYPE,
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.CHRTYPE,
        tarfile.FIFOTYPE,
        b"7",
    )
    links = ("..", "../..", "/", str(outside / "secret"), str(outside), "data/a", "a", ".", "../secret", "link", "")
    with tarfile.open(fileobj=target, mode=f"w:{any_of(rng, ('', 'gz', 'bz2', 'xz'))}", format=pax) as tar:
        for _ in range(rng.integers(0, 6)):
            info = tarfile.TarInfo(any_of(rng, (*HOSTILE_NAMES, "data/link", "link")).replace("\ud800", "\udc80"))
            hostile = rng.random() < 0.5
            info.type = any_of(rng, types) if hostile else tarfile.REGTYPE
            info.linkname, info.mode = any_of(rng, links), int(any_of(rng, (0o644, 0o4777, 0, 0o7777)))
            info.uid = info.gid = int(any_of(rng, (0, 1000, 2**21 - 1)))
            info.mtime = int(any_of(rng, (0, 2**33 - 1)))
            content = bytes(int(any_of(rng, (0, 1, 700, 70_000)))) if info.isreg() else b""
            info.size = len(content)
            if pax == tarfile.PAX_FORMAT and rng.random() < 0.2:
                key = any_of(
                    rng, ("path", "linkpath", "size", "GNU.sparse.realsize", "GNU.sparse.map", "mtime", "hdrcharset")
                )
                value = any_of(rng, ("../x", str(outside / "x"), "-1", "9" * 30, "nan", "0,9999999999", "x"))
                info.pax_headers = {key: value, "GNU.sparse.major": "0"}
            tar.addfile(info, io.BytesIO(content))
        info = tarfile.TarInfo("data/last")
        info.size = 4
        tar.addfile(info, io.BytesIO(b"last"))
    return target.getvalue()


def hostile_zip(rng, outside) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(
        target, "w", any_of(rng, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))
    ) as file:
        for _ in range(rng.integers(0, 6)):
            info = zipfile.ZipInfo(
                any_of(rng, (*HOSTILE_NAMES, "data/link", "/", str(outside / "x"))).replace("\ud800", "u") or "x"
            )
            info.external_attr = int(any_of(rng, (0, 0o120777, 0o100644, 0o020666, 0o040755))) << 16
            file.writestr(info, any_of(rng, (b"", b"../secret", str(outside).encode(), bytes(70_000))))
        file.writestr("data/last", b"last")
    return target.getvalue()


@target("archive")
def archive_cases(home) -> Cases:
    def case(rng, folder):
        data = hostile_tar(rng, folder.parent) if rng.random() < 0.6 else hostile_zip(rng, folder.parent)
        data = damaged(rng, data, head=600) if rng.random() < 0.4 else data
        path, into = folder / "archive.bin", folder / "data set"
        path.write_bytes(data)
        if rng.random() < 0.2:
            contents = archive.read_members(path, ["last"], 1000)
            assert list(contents) == ["last"]
            return True
        try:
            archive.unpack(path, into, ["data"])
        finally:
            left = [Path(at, name) for at, folders, files in os.walk(into) for name in folders + files]
            for each in left:
                assert not each.is_symlink(), each
                assert each.is_dir() or (each.is_file() and each.stat().st_nlink == 1), each
                assert each.stat().st_mode & 0o7000 == 0, each
            assert not list(into.glob(".*")), "something half unpacked is left"
        assert (into / "data").exists()
        assert [each.name for each in into.iterdir()] == ["data"]
        return True

    yield case


def mat(arrays_by_name) -> bytes:
    """A MATLAB 5 file."""

    def element(kind, data):
        return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)

    body = b"".join(
        element(14, element(6, struct.pack("<II", 9, 0)) + element(5, struct.pack(f"<{a.ndim}i", *a.shape))
                + element(1, name.encode()) + element(2, a.tobytes(order="F")))
        for name, a in arrays_by_name.items()
    )  # fmt: skip
    packed = zlib.compress(body)
    return (
        b"MATLAB 5.0".ljust(124) + b"\0\1IM" + (element(15, packed).rstrip(b"\0") if len(arrays_by_name) == 1 else body)
    )


class Call:
    def __reduce__(self):
        return os.system, ("true",)


@target("arrays")
def arrays_cases(home) -> Cases:
    x, y = pixels(0, (6, 8, 8, 3)), np.arange(6) % 3
    stored = io.BytesIO()
    np.savez_compressed(stored, x=x, y=y, names=np.array(["a", "b", "c"]))
    rows, ten = pixels(0, (5, 3072)), list(range(5))
    batch = {"data": rows, "labels": ten, "fine_labels": ten, "coarse_labels": ten}
    names = {"label_names": list("abcde"), "fine_label_names": list("abcde")}
    flat = b"\0\0\x08\x03" + struct.pack(">III", 6, 8, 8) + x[..., 0].tobytes()
    labels = b"\0\0\x08\x01" + struct.pack(">I", 6) + bytes(y.tolist())
    corpus = {
        "set.npz": [stored.getvalue()],
        "t10k-images-idx3-ubyte": [flat, gzip.compress(flat)],
        "test_32x32.mat": [mat({"X": pixels(0, (32, 32, 3, 4)), "y": np.arange(1, 5, dtype=np.uint8)[:, None]})],
        "test": [pickle.dumps(value, protocol) for value in (batch, names, Call(), [Call()]) for protocol in (2, 4, 0)],
    }
    kinds = tuple(corpus)

    def case(rng, folder):
        name = any_of(rng, kinds)
        data = any_of(rng, corpus[name])
        data = damaged(rng, data, [each for files in corpus.values() for each in files]) if rng.random() < 0.9 else data
        if name.endswith("npz") and rng.random() < 0.5:
            data = reheaded(rng, x, y)
        (folder / name).write_bytes(data)
        if name == "set.npz":
            found = arrays.npz(folder / name)
            assert len(found.images) == len(found)
        elif name.startswith("t10k"):
            (folder / "t10k-labels-idx1-ubyte").write_bytes(labels)
            getattr(sources, "idx", arrays).read_idx_pair(folder / name, "test", "mnist", classes=tuple("abc"))
        elif name.endswith("mat"):
            read_svhn(folder / name, "test", "svhn")
        else:
            assert all(isinstance(key, str) for key in unpickle(data, "batch"))
        return True

    yield case


def reheaded(rng, x, y) -> bytes:
    """An .npz whose arrays state another type, order or shape."""
    target = io.BytesIO()
    types = ("|u1", "<f8", "|O", ">i8", "<U5", "|S3", "|V8", "<M8[s]", "<c16", "|b1", "[('a', '|O')]")
    with zipfile.ZipFile(target, "w") as file:
        for name, value in (("x", x), ("y", y)):
            shape = any_of(rng, (value.shape, (2**40, 2), (-1,), (0,), (2**62, 2**62), (6, 8), ()))
            kind = any_of(rng, (value.dtype.str, any_of(rng, types)))
            head = (
                f"{{'descr': '{kind}', 'fortran_order': {any_of(rng, (False, True, 3))}, 'shape': {shape}, }}".encode()
            )
            head = damaged(rng, head) if rng.random() < 0.3 else head
            file.writestr(
                f"{name}.npy", b"\x93NUMPY\1\0" + struct.pack("<H", len(head) + 1) + head + b"\n" + value.tobytes()
            )
    return target.getvalue()
