"""Scoring by Ray: the rows of one process, whatever becomes of the workers."""

import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import sys

import numpy as np
import pytest

import kedge
from helpers import StopError, picture, run_cli, small_amp
from kedge.errors import FileFormatError, InputError, KedgeError, NotReadyError
from kedge.files import atomic
from kedge.scoring import Job, RayEngine, ray_engine, read_rows, score_files
from kedge.scoring.ray_engine import TRIES, Worker

SHARD = 5
IMAGES = 61  # one of them broken
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'kedge[ray]'"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Sixty images and a file that is none, a detector, and the rows that one process writes, in three formats."""
    home = tmp_path_factory.mktemp("ray")
    (home / "photos").mkdir()
    for number in range(60):
        picture(number).save(home / "photos" / f"{number:02}.png")
    (home / "photos" / "30-broken.png").write_bytes(b"no image")
    small_amp().save(home / "detector.kedge")
    return home


def scored(home, out, engine=None, **options):
    options = {"shard": SHARD} | options
    score_files(home / "detector.kedge", [str(home / "photos")], out, engine=engine, **options)
    return list(read_rows(out))


def stop_after(images):
    def stop(done, total):
        if done >= images:
            raise StopError

    return stop


@pytest.fixture
def job(home, tmp_path, monkeypatch):
    """A job that was stopped once two shards were scored."""
    out = tmp_path / "out.csv"
    with pytest.raises(StopError):
        scored(home, out, progress=stop_after(2 * SHARD))
    monkeypatch.chdir(tmp_path)  # which a worker changes
    return Job(home / "detector.kedge", (str(home / "photos"),), out, "csv", SHARD)


def run(job, *numbers, probes=(), worker=None):
    """What a worker returns for the shards with these numbers."""
    offsets = job.offsets()
    worker = worker or Worker(job, str(job.out.parent), list(probes))
    return worker({"number": np.array(numbers), "offset": np.array([offsets[number] for number in numbers])})


# --- without a cluster ----------------------------------------------------------------------------------------------


def test_what_is_wrong_is_named_before_a_job_is_begun(home, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="parallel must be a whole number of at least 1"):
        RayEngine(parallel=0)
    with pytest.raises(InputError, match="address must be"):
        RayEngine("ray://a:1")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(NotReadyError, match=r"needs ray, which is missing: pip install 'kedge\[ray\]'"):
        scored(home, tmp_path / "out.csv", RayEngine())
    base = ["score", home / "detector.kedge", home / "photos", "-o", tmp_path / "b.csv"]
    for options, message in [
        (["--engine", "spark"], "--engine must be one of 'local', 'ray'; got 'spark'"),
        (["--engine", "ray"], "needs ray"),
        (["--engine", "ray", "--threads", 2], "--threads is for --engine local"),
        (["--parallel", 2], "--parallel is for --engine ray"),
        (["--ray-address", "auto"], "--ray-address is for --engine ray"),
    ]:
        assert message in str(run_cli(*base, *options).exception)
    assert not (tmp_path / "b.csv.parts").exists()


def test_a_worker_scores_what_has_no_rows_yet_and_loads_its_detector_once(home, job):
    assert [next(job.shards(offset)) for offset in job.offsets()] == list(job.shards())
    assert [job.part(number).exists() for number in range(4)] == [True, True, False, False]
    job.part(1).write_text("as it was")
    worker = Worker(job, str(job.out.parent), [])
    result = run(job, 1, 2, worker=worker)
    assert result == {"images": [2 * SHARD], "kind": [""], "error": [""], "trace": [""]}
    assert job.part(1).read_text() == "as it was"
    assert len(list(read_rows(job.part(2)))) == SHARD
    assert not list(job.folder.glob("try-*"))
    (detector := home / "detector.kedge").rename(home / "elsewhere")
    try:
        assert run(job, 3, worker=worker)["error"] == [""]
    finally:
        (home / "elsewhere").rename(detector)
    assert job.part(3).exists()


def test_a_worker_that_lacks_files_or_fails_returns_the_error(home, job, monkeypatch):
    result = run(job, 2, probes=[str(home / "photos/00.png"), "/not/mounted.png"])
    assert result["kind"] == ["NotReadyError"]
    assert "/not/mounted.png must be visible to all machines of the cluster" in result["error"][0]
    (job.folder / "try-00000003").write_bytes(b"." * (TRIES - 1))
    (job.folder / "try-00000004").write_bytes(b"." * TRIES)
    assert run(job, 3)["error"] == [""]
    killed = rf"{TRIES} workers were killed while they scored the images from .*photos/20\.png to "
    assert re.match(killed, run(job, 4)["error"][0])
    with monkeypatch.context() as patch:
        patch.setattr(ray_engine, "load", lambda path, model: 1 / 0)
        result = run(job, 2)
    assert result["error"][0].startswith("ZeroDivisionError: division by zero; on ")
    assert "in _begin" in result["trace"][0]
    assert not job.part(2).exists()
    head = json.loads((job.folder / "job.json").read_text())
    head["identity"]["detector"] = "of another file"
    (job.folder / "job.json").write_text(json.dumps(head))
    assert "detector must be the same file on all machines" in run(job, 2)["error"][0]
    shutil.rmtree(job.folder)
    lost = Worker(job, str(job.out.parent), [])({"number": np.array([0]), "offset": np.array([0])})
    assert "plan.jsonl must be visible to all machines" in lost["error"][0]


# --- in a cluster ---------------------------------------------------------------------------------------------------


@needs_ray
def test_the_engine_reports_what_workers_return_and_leaves_a_cluster_running(home, tmp_path, monkeypatch):
    """With a worker in this process."""
    import ray

    def in_this_process(_, job, waiting, parallel):
        for number in waiting:
            yield from zip(*run(job, number).values(), strict=True)

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: pytest.fail("not the engine's own"))
    monkeypatch.setattr(ray_engine, "_results", in_this_process)
    reports = []
    with pytest.raises(StopError):
        scored(home, tmp_path / "out.csv", progress=stop_after(20))
    scored(home, tmp_path / "out.csv", RayEngine(), progress=lambda *each: reports.append(each))
    assert (reports[0], reports[-1]) == ((20, IMAGES), (IMAGES, IMAGES))
    assert len(reports) == 1 + 9  # 41 images in shards of five, as each is done

    header, tensors = kedge.io.artifact.read(home / "detector.kedge")
    header["detector"]["name"] = "strange"
    kedge.io.artifact.write(tmp_path / "other.kedge", header, tensors)
    with pytest.raises(FileFormatError, match="'strange'") as caught:
        score_files(tmp_path / "other.kedge", [str(home / "photos")], tmp_path / "other.csv", engine=RayEngine())
    assert "Traceback" in caught.value.__notes__[0]
    assert not (tmp_path / "other.csv").exists()


@needs_ray
def test_the_command_continues_a_job_in_a_cluster_of_its_own_though_a_worker_is_killed(home, tmp_path, monkeypatch):
    """With the rows of one process, and nothing printed but its own result."""
    import ray

    (tmp_path / "photos").symlink_to(home / "photos")
    shutil.copy(home / "detector.kedge", tmp_path)
    monkeypatch.chdir(tmp_path)  # workers find relative paths
    marker = tmp_path / "killed"

    class Mortal(Worker):
        def _score(self, detector, number, offset):
            if number == 6 and not marker.exists():
                marker.write_text(str(os.getpid()))
                with atomic(self.job.part(number)) as temporary:
                    temporary.write_text('{"name": "half a ro')
                    os.kill(os.getpid(), signal.SIGKILL)
            return super()._score(detector, number, offset)

    given = ("detector.kedge", ["photos/*.png"])
    score_files(*given, "whole.jsonl", shard=SHARD)
    with pytest.raises(StopError):
        score_files(*given, "out.jsonl", shard=SHARD, progress=stop_after(20))
    monkeypatch.setattr(ray_engine, "Worker", Mortal)
    monkeypatch.setattr(ray, "init", functools.partial(ray.init, num_cpus=2))  # whatever this machine has
    monkeypatch.setenv("RAY_worker_niceness", "0")  # workers that do not stand back behind everything else that runs
    command = ["score", "detector.kedge", "photos/*.png", "-o", "out.jsonl", "--shard", SHARD, "--json", "--no-summary"]
    done = run_cli(*command, "--engine", "ray", "--ray-address", "local", "--parallel", 2)
    assert done.exit_code == 0, (done.output, done.exception)
    assert json.loads(done.stdout)["images"] == IMAGES
    assert not ray.is_initialized()
    assert int(marker.read_text()) != os.getpid()
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    rows = list(read_rows("out.jsonl"))
    assert len({row["name"] for row in rows}) == len(rows) == IMAGES
    assert [row["name"] for row in rows if row["error"]] == ["photos/30-broken.png"]


@needs_ray
def test_a_cluster_that_is_not_there_is_named(home, tmp_path, monkeypatch):
    import ray

    def refuse(*arguments, **options):
        raise ConnectionError("nobody listens")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(InputError, match="address must be that of a running Ray cluster; 'host:1' is not: nobody"):
        scored(home, tmp_path / "out.csv", RayEngine("host:1"))
    with pytest.raises(KedgeError, match="Ray did not start on this machine: nobody"):
        scored(home, tmp_path / "out.csv", RayEngine())
