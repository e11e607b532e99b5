"""Prefetching: results in order, errors in order, and images decoded while the network computes."""

import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import kedge
from kedge.data import Preprocess, StreamedSet, batches
from kedge.data.reading import in_order, readers
from kedge.data.streamed import Files
from kedge.errors import InputError
from kedge.scoring import plan
from kedge.scoring.job import score_shards

TIMEOUT = 30  # seconds until a test of concurrency fails


def threads_alive():
    return [thread for thread in threading.enumerate() if thread.name.startswith("kedge-reader")]


# --- in_order -------------------------------------------------------------------------------------------------------


def test_results_come_in_the_order_of_the_tasks_whichever_finishes_first():
    def task(n):
        time.sleep(0.02 if n % 3 == 0 else 0)
        return n

    assert list(in_order((lambda n=n: task(n) for n in range(20)), ahead=5, workers=4)) == list(range(20))


def test_no_more_tasks_are_taken_than_may_wait():
    taken = []

    def tasks():
        for n in range(100):
            taken.append(n)
            yield lambda n=n: n

    results = in_order(tasks(), ahead=7, workers=2)
    assert next(results) == 0
    assert len(taken) == 7
    assert next(results) == 1
    assert len(taken) == 8


def raises(text):
    raise InputError(text)


def broken_tasks():
    yield lambda: 1
    yield lambda: 2
    raises("the third")


@pytest.mark.parametrize("tasks", [lambda: [lambda: 1, lambda: 2, lambda: raises("the third"), int], broken_tasks])
def test_an_error_of_a_task_or_of_the_iterable_comes_after_the_results_before_it(tasks):
    results = in_order(tasks(), ahead=4)
    assert [next(results), next(results)] == [1, 2]
    with pytest.raises(InputError, match="the third"):
        next(results)
    assert not threads_alive()


def test_no_thread_runs_on_once_the_caller_stops():
    results = in_order((lambda n=n: n for n in range(1000)), ahead=10)
    next(results)
    results.close()
    assert not threads_alive()
    with pytest.raises(InputError, match="ahead must be a whole number of at least 1; got 0"):
        next(in_order([], ahead=0))


@pytest.mark.parametrize(("cores", "threads"), [(1, 2), (4, 4), (64, 8)])
def test_there_is_one_reader_per_core_within_limits(monkeypatch, cores, threads):
    monkeypatch.setattr("kedge.data.reading.cores", lambda: cores)
    assert readers() == threads


# --- image files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    """Twelve images of one colour each, whose number is the colour."""
    for n in range(12):
        Image.new("RGB", (20, 16), (n, n, n)).save(tmp_path / f"{n:02}.png")
    return sorted(tmp_path.iterdir())


def streamed(files):
    names = tuple(file.name for file in files)
    return StreamedSet(Files(files[0].parent, names), labels=torch.arange(len(files)) % 3)


@pytest.mark.parametrize("kind", [list, streamed])
def test_files_are_decoded_ahead_in_their_order(files, kind):
    parts = list(batches(kind(files), Preprocess((3, 8, 8)), size=5))
    assert [len(x) for x, _ in parts] == [5, 5, 2]
    assert torch.cat([x for x, _ in parts])[:, 0, 0, 0].tolist() == list(range(12))
    if kind is streamed:
        assert torch.cat([y for _, y in parts]).tolist() == [n % 3 for n in range(12)]
    else:
        assert all(y is None for _, y in parts)
    assert not threads_alive()


class Watched(nn.Module):
    """A network that waits until images after its batch have been decoded, if there are any."""

    def __init__(self, decoded, total, expected):
        super().__init__()
        self.decoded, self.total, self.expected = decoded, total, expected
        self.linear, self.seen = nn.Linear(3, 2), 0

    def forward(self, x):
        self.seen += len(x)
        wanted = min(self.total, self.seen + self.expected)
        end = time.monotonic() + TIMEOUT
        while len(self.decoded) < wanted:
            assert time.monotonic() < end, f"{len(self.decoded)} images decoded, {wanted} expected"
            time.sleep(0.001)
        return self.linear(x.mean(dim=(2, 3)))


@pytest.fixture
def decoded(monkeypatch):
    """The images decoded so far."""
    done = []
    from_pil = Preprocess._from_pil

    def watched(self, image):
        done.append(image)
        return from_pil(self, image)

    monkeypatch.setattr(Preprocess, "_from_pil", watched)
    return done


def detector_that_waits(decoded, total, expected):
    net = Watched(decoded, 0, 0)
    detector = kedge.MSP(net).fit(torch.rand(4, 3, 8, 8)).calibrate(torch.rand(20, 3, 8, 8))
    net.seen, net.total, net.expected = 0, total, expected
    decoded.clear()
    return detector


@pytest.mark.parametrize("kind", [list, streamed])
def test_the_next_batch_is_decoded_while_the_network_computes(files, kind, decoded):
    detector = detector_that_waits(decoded, total=12, expected=4)
    assert detector.score(kind(files), batch_size=4).shape == (12,)


def test_the_next_shard_is_decoded_while_the_network_computes(files, decoded):
    detector = detector_that_waits(decoded, total=12, expected=4)
    shards = enumerate(plan([str(files[0].parent)], shard=4))
    rows = dict(score_shards(detector, shards, batch=4))
    assert [[row["name"] for row in rows[n]] for n in range(3)] == [list(map(str, files[n : n + 4])) for n in (0, 4, 8)]
    assert not threads_alive()


def test_a_shard_that_cannot_be_read_comes_after_the_rows_before_it(files, tmp_path):
    import pyarrow
    import pyarrow.parquet

    for name in ("a", "z"):
        pyarrow.parquet.write_table(pyarrow.table({"image": [files[0].read_bytes()]}), tmp_path / f"{name}.parquet")
    shards = list(plan([str(tmp_path / "a.parquet"), str(tmp_path / "z.parquet")]))
    (tmp_path / "z.parquet").write_bytes(b"no longer parquet")
    detector = kedge.MSP(nn.Sequential(nn.Flatten(), nn.Linear(192, 2)))
    detector.fit(torch.rand(4, 3, 8, 8)).calibrate(torch.rand(20, 3, 8, 8))
    scored = score_shards(detector, enumerate(shards))
    number, rows = next(scored)
    assert (number, len(rows), rows[0]["error"]) == (0, 1, None)
    with pytest.raises(kedge.errors.FileFormatError, match=r"z\.parquet cannot be read as a parquet file"):
        next(scored)


def test_a_user_s_data_set_is_read_in_the_caller_s_thread():
    seen = set()

    class Own(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            seen.add(threading.current_thread())
            return np.zeros((8, 8, 3), np.uint8)

    assert [len(x) for x, _ in batches(Own(), Preprocess((3, 8, 8)), size=2)] == [2, 1]
    assert seen == {threading.current_thread()}
