"""The service: answers equal the detector's, limits hold, and nothing that a client sends brings it down."""

import asyncio
import base64
import copy
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from PIL import Image
from typer.testing import CliRunner

import kedge
from kedge.cli import app
from kedge.errors import InputError, KedgeWarning, NotReadyError
from kedge.models import build
from kedge.seeds import seeded
from kedge.serving import Batcher, Busy, Settings, create_app
from kedge.serving.metrics import WINDOW, Metrics

CLASSES = ("ant", "bee", "cow")
PNG = {"Content-Type": "image/png"}


def png(seed=0, size=(12, 12), mode="RGB") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    target = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(target, format="png")
    return target.getvalue()


@pytest.fixture(scope="module")
def detector():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (60, 3, 12, 12), dtype=torch.uint8, generator=generator)
    train = kedge.ImageSet(images, torch.arange(60) % 3, classes=CLASSES)
    with seeded(0):
        net = kedge.anchor(build("compact", width=4, classes=3), init="fresh", seed=0)
    return kedge.AMP(net, k=3).fit(train).calibrate(torch.rand(50, 3, 12, 12, generator=generator))


def client(detector, **limits):
    return TestClient(create_app(detector, Settings(**limits)), raise_server_exceptions=False)


def expected(detector, data):
    said = detector([Image.open(io.BytesIO(data))])
    return {
        "label": int(said.label[0]),
        "name": CLASSES[int(said.label[0])],
        "probability": pytest.approx(float(said.probability[0].max()), rel=1e-4),
        "score": pytest.approx(float(said.score[0]), rel=1e-4),
        "temperature": pytest.approx(float(said.tau[0]), abs=1e-5),
        "p_value": pytest.approx(float(said.p_value[0])),
        "is_ood": bool(said.is_ood[0]),
    }


def test_an_image_comes_as_a_body_a_form_or_base64_and_gets_the_detector_s_answer(detector):
    one, two = png(1), png(2, size=(40, 30), mode="L")
    with client(detector) as http:
        raw = http.post("/v1/score", content=one, headers={"Content-Type": "image/png"})
        form = http.post("/v1/score", files=[("images", ("a.png", one)), ("images", ("b.png", two))])
        text = [base64.b64encode(data).decode() for data in (one, two)]
        many = http.post("/v1/score", json={"images": text})
        single = http.post("/v1/score", json={"image": f"data:image/png;base64,{text[1]}"})
    assert [r.status_code for r in (raw, form, many, single)] == [200] * 4
    assert raw.json() == {"results": [expected(detector, one)]}
    assert form.json() == many.json() == {"results": [expected(detector, one), expected(detector, two)]}
    assert single.json()["results"] == many.json()["results"][1:]


@pytest.mark.parametrize(
    ("content", "kind", "code", "words"),
    [
        (b"", "image/png", 400, r"images\[0\] cannot be read as an image"),
        (b"no image", "image/png", 400, "cannot be read"),
        (png()[:60], "image/png", 400, r"images\[0\] cannot be read"),
        (b"{", "application/json", 422, "must be JSON"),
        (b"[" * 100_000, "application/json", 413, "more values than so many need"),
        (b"[1]", "application/json", 422, 'must be {"image"'),
        (b'{"images": 3}', "application/json", 422, "must be a list"),
        (b'{"images": []}', "application/json", 400, "at least one"),
        (b'{"images": [3]}', "application/json", 400, r"images\[0\] must be base64 text; got int"),
        (b'{"images": ["%%%"]}', "application/json", 400, r"images\[0\] must be base64"),
        (b'{"image": "", "images": []}', "application/json", 422, "must be"),
        (b"x=1", "application/x-www-form-urlencoded", 415, "content-type must be"),
        (b"nothing", "multipart/form-data", 422, "form cannot be read"),
        (b"--x\r\nnonsense", "multipart/form-data; boundary=x", 400, "at least one image"),
    ],
)
def test_what_is_wrong_with_a_request_is_told_and_the_next_one_is_answered(detector, content, kind, code, words):
    with client(detector) as http:
        wrong = http.post("/v1/score", content=content, headers={"Content-Type": kind})
        assert wrong.status_code == code
        assert re.search(words, wrong.json()["detail"])
        assert "Traceback" not in wrong.text
        assert http.post("/v1/score", content=png(), headers={"Content-Type": "image/png"}).status_code == 200


def test_size_pixels_and_number_are_limited(detector):
    with client(detector, max_bytes=5000, max_pixels=1000, max_images=3, max_queue=64) as http:
        long = http.post("/v1/score", content=bytes(6000), headers={"Content-Type": "image/png"})
        chunks = http.post("/v1/score", content=iter([bytes(3000)] * 2), headers={"Content-Type": "image/png"})
        large = http.post("/v1/score", content=png(size=(100, 11), mode="1"), headers={"Content-Type": "image/png"})
        many = http.post("/v1/score", json={"images": [base64.b64encode(png()).decode()] * 4})
        form = http.post("/v1/score", files=[("images", (f"{n}.png", png())) for n in range(4)])
    assert [r.status_code for r in (long, chunks, large, many, form)] == [413, 413, 400, 413, 413]
    assert "at most 5,000 bytes" in long.json()["detail"]
    assert "at most 1,000 pixels; got 100 x 11" in large.json()["detail"]
    assert "at most 3; got 4" in many.json()["detail"]


def test_an_enormous_image_is_refused_by_its_head_without_being_decoded(detector):
    head = png(size=(8, 8))
    huge = head[:16] + (60_000).to_bytes(4, "big") * 2 + head[24:]  # IHDR says 60,000 x 60,000
    with client(detector) as http:
        answer = http.post("/v1/score", content=huge, headers={"Content-Type": "image/png"})
    assert answer.status_code == 400


def test_a_token_is_asked_for_where_there_is_one(detector):
    with client(detector, token="secret") as http:
        assert http.get("/v1/info").status_code == 401
        assert http.get("/v1/info", headers={"Authorization": "Bearer other"}).status_code == 401
        assert http.get("/v1/info", headers={"Authorization": "Bearer secret"}).status_code == 200
        for address in ("/", "/healthz", "/readyz", "/docs", "/openapi.json"):
            assert http.get(address).status_code == 200
        assert http.get("/metrics").status_code == 401


def test_mounted_in_another_application_it_answers_guards_and_counts(detector):
    outer, inner = FastAPI(), create_app(detector, Settings(token="secret"))
    outer.mount("/birds", inner)
    known = {"Authorization": "Bearer secret"}
    with TestClient(outer) as http:
        assert [http.get(f"/birds/{open}").status_code for open in ("", "healthz", "readyz")] == [200] * 3
        assert http.get("/birds/v1/info").status_code == 401
        answer = http.post("/birds/v1/score", content=png(1), headers=PNG | known)
        text = http.get("/birds/metrics", headers=known).text
        http.portal.call(inner.state.service.stop)
    assert answer.json() == {"results": [expected(detector, png(1))]}
    assert value(text, 'kedge_requests_total{code="200"}') == 1


def test_info_health_and_the_description(detector):
    with client(detector) as http:
        info = http.get("/v1/info").json()
        assert (info["method"], info["classes"], info["input"]) == ("amp", list(CLASSES), [3, 12, 12])
        assert (info["threshold"], info["passes_per_image"]) == (detector.calibration.threshold, 3)
        assert http.get("/healthz").json() == {"status": "alive"}
        assert http.get("/readyz").json() == {"status": "ready"}
        described = http.get("/openapi.json").json()
        assert set(described["paths"]["/v1/score"]["post"]["requestBody"]["content"]) == {
            "image/*", "multipart/form-data", "application/json"
        }  # fmt: skip


def test_a_detector_that_can_flag_nothing_has_no_threshold_to_tell(detector):
    bare = copy.copy(detector)
    with pytest.warns(KedgeWarning, match="too few to flag any image"):
        bare.calibrate(torch.rand(5, 3, 12, 12))
    with client(bare) as http:
        assert http.get("/v1/info").json()["threshold"] is None
        assert http.get("/v1/background").json()["threshold"] is None
        described = http.get("/openapi.json").json()["components"]["schemas"]["Info"]["properties"]["threshold"]
    assert {"type": "null"} in described["anyOf"]


def value(text, name):
    return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"{name} "))


def test_metrics_count_what_was_answered(detector):
    images = [png(n) for n in range(7)]
    flagged = sum(bool(detector([Image.open(io.BytesIO(data))]).is_ood[0]) for data in images)
    with client(detector) as http:
        http.post("/v1/score", files=[("images", (f"{n}.png", data)) for n, data in enumerate(images)])
        http.post("/v1/score", content=b"", headers={"Content-Type": "image/png"})
        text = http.get("/metrics").text
    assert value(text, "kedge_images_total") == 7
    assert value(text, "kedge_images_flagged_total") == flagged
    assert value(text, "kedge_score_count") == 7
    assert value(text, 'kedge_requests_total{code="200"}') == 1
    assert value(text, 'kedge_requests_total{code="400"}') == 1
    assert value(text, "kedge_request_seconds_count") == 2


def test_metrics_tell_of_drift(detector):
    said = {}
    for name, image in (("before", None), ("after", png(0))):
        with client(detector) as http:
            for _ in range(0 if image is None else 3):  # the same image again and again: nothing like a calibration set
                http.post("/v1/score", files=[("images", (f"{n}.png", image)) for n in range(60)])
            said[name] = http.get("/metrics").text
    assert value(said["before"], "kedge_drift_alarm") == 0
    assert value(said["after"], "kedge_drift_alarm") == 1
    assert value(said["after"], "kedge_drift_log_wealth") > 4.6


def test_metrics_compare_the_newest_scores_with_the_calibration_and_forget_the_alarm():
    metrics, rng, said = Metrics(torch.arange(1000.0) / 1000), np.random.default_rng(0), []
    for shift in (0, 0, 0.5, 0):  # the calibration scores are uniform
        metrics.scored((shift + rng.random(WINDOW)).tolist(), 0)
        text = metrics.text().decode()
        said.append((value(text, "kedge_drift_window_p_value"), value(text, "kedge_drift_window_alarm")))
    p, alarms = zip(*said, strict=True)
    assert alarms == (0, 0, 1, 0)
    assert p[2] < 1e-6 < 0.01 < min(p[0], p[1], p[3])


def test_with_few_calibration_scores_there_is_no_window():
    metrics = Metrics(torch.arange(19.0))
    metrics.scored([9.0] * WINDOW, 0)
    assert value(metrics.text().decode(), "kedge_drift_window_p_value") == 1


def test_the_memory_of_the_drift_does_not_grow_with_what_was_scored(detector):
    assert create_app(detector).state.service.metrics.drift.state()["bounded"]


def test_a_detector_that_fails_is_told_to_the_log_and_not_to_the_client(detector, monkeypatch, caplog):
    app = create_app(detector)
    batcher = app.state.service.batcher
    monkeypatch.setattr(batcher, "runs", [lambda images: 1 / 0] * len(batcher.runs))
    with TestClient(app, raise_server_exceptions=False) as http:
        answer = http.post("/v1/score", content=png(), headers={"Content-Type": "image/png"})
    assert answer.status_code == 500
    assert "ZeroDivision" not in answer.text
    assert "division" not in answer.text
    assert "ZeroDivisionError" in caplog.text


def test_what_the_detector_itself_complains_of_is_no_fault_of_the_client(detector, caplog):
    app = create_app(detector)
    for weights in app.state.service.detector.net.parameters():
        weights.data.fill_(float("nan"))
    with TestClient(app, raise_server_exceptions=False) as http:
        answers = [http.post(f"/v1/{what}", content=png(), headers=PNG) for what in ("score", "explain")]
    assert [answer.status_code for answer in answers] == [500, 500]
    assert "the network gives NaN or infinite logits" in caplog.text
    assert all("NaN" not in answer.text for answer in answers)


def test_two_networks_answer_as_one(detector, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # of the machine; each network then has one
    app = create_app(detector)
    monkeypatch.undo()
    service = app.state.service
    assert len(service.batcher.runs) == 2
    seen = []
    for number, run in enumerate(service.batcher.runs):
        service.batcher.runs[number] = lambda images, run=run: (
            seen.append((threading.current_thread().name, torch.get_num_threads())) or run(images)
        )
    with TestClient(app) as http:
        files = [("images", (f"{n}.png", png(n))) for n in range(40)]
        answers = http.post("/v1/score", files=files).json()["results"]
        metrics = http.get("/metrics").text
        explained = http.post("/v1/explain", content=png(1), headers=PNG).json()
    assert [answer["label"] for answer in answers] == [expected(detector, png(n))["label"] for n in range(40)]
    assert set(seen) == {("kedge-network-0_0", 1), ("kedge-network-1_0", 1)}
    assert "kedge_images_total 40.0" in metrics
    assert len(explained["hypotheses"]) == 3
    assert torch.get_num_threads() == before


def test_an_explanation_is_the_answer_and_what_each_anchor_predicts(detector):
    with client(detector) as http:
        said = http.post("/v1/explain", content=png(1), headers=PNG).json()
        several = http.post("/v1/explain", files=[("images", (f"{n}.png", png())) for n in range(2)])
        behind = http.get("/v1/background").json()
    assert said["result"] == expected(detector, png(1))
    assert len(said["hypotheses"]) == len(behind["anchors"]) == 3
    assert {h["name"] for h in said["hypotheses"]} <= set(CLASSES)
    assert said["image"].startswith("data:image/png;base64,")
    assert behind["threshold"] == detector.calibration.threshold
    assert sum(behind["shares"]) == pytest.approx(1)
    assert len(behind["edges"]) == len(behind["shares"]) + 1
    assert several.status_code == 422


def test_an_explanation_takes_a_place_and_the_network_s_own_thread(detector, monkeypatch):
    app, seen = create_app(detector), []

    def watched(*_):
        seen.append((app.state.service.taken, threading.current_thread().name))
        return []

    monkeypatch.setattr("kedge.serving.service.by_anchor", watched)
    with TestClient(app) as http:
        assert http.post("/v1/explain", content=png(), headers=PNG).status_code == 200
    assert seen == [(1, "kedge-network-0_0")]


def test_a_detector_must_have_a_threshold_and_limits_must_make_sense(detector):
    bare = kedge.AMP(kedge.anchor(build("compact", width=4, classes=3))).fit(torch.rand(20, 3, 12, 12))
    with pytest.raises(NotReadyError, match="no threshold yet"):
        create_app(bare)
    with pytest.raises(InputError, match="max_queue must be a whole number of at least 64; got 10"):
        Settings(max_queue=10)
    with pytest.raises(InputError, match="timeout"):
        Settings(timeout=0)


# The batcher.


def together(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def ones(count, start=0):
    return [torch.tensor([float(start + n)]) for n in range(count)]


def test_requests_that_come_together_share_batches_and_get_their_own_answers():
    sizes = []

    def run(images):
        sizes.append(len(images))
        time.sleep(0.02)
        return [2 * float(x) for x in images]

    async def main():
        batcher = Batcher([run], max_batch=8, max_delay=0.05, max_queue=100)
        answers = await asyncio.gather(*(batcher.submit(ones(n, 10 * n)) for n in (1, 2, 3, 11, 1)))
        await batcher.stop()
        return answers

    answers = together(main())
    assert answers == [[2.0 * (10 * n + i) for i in range(n)] for n in (1, 2, 3, 11, 1)]
    assert sum(sizes) == 18
    assert max(sizes) == 8
    assert len(sizes) == 3  # 18 images in batches of eight


def test_a_batch_is_half_of_what_several_callers_wait_for():
    sizes = []

    def run(images):
        sizes.append(len(images))
        return list(images)

    async def main():
        batcher = Batcher([run], max_batch=64, max_delay=0.05, max_queue=100)
        await asyncio.gather(*(batcher.submit(ones(1)) for _ in range(32)))
        await batcher.submit(ones(32))
        await batcher.stop()

    together(main())
    assert sizes == [16, 8, 8, 32], "the last has one caller, who gains nothing by halves"


def test_two_networks_work_at_the_same_time_and_answers_keep_their_order():
    both = threading.Barrier(2)

    def run(images):
        both.wait(10)  # passes only if the other network has a batch too
        return [float(x) for x in images]

    async def main():
        batcher = Batcher([run, run], max_batch=64, max_delay=0.0, max_queue=100)
        answers = await batcher.submit(ones(32))
        await batcher.stop()
        return answers

    assert together(main()) == [float(n) for n in range(32)]


def test_a_failure_in_one_network_leaves_the_other_at_work():
    def fail(images):
        time.sleep(0.05)
        raise ValueError("bad network")

    async def main():
        batcher = Batcher([lambda images: list(map(float, images)), fail], max_batch=8, max_delay=0.0, max_queue=100)
        answers = await asyncio.gather(*(batcher.submit(ones(8, k)) for k in (0, 10)), return_exceptions=True)
        assert batcher.queued == 0
        await batcher.stop()
        return answers

    first, second = together(main())
    assert first == [float(n) for n in range(8)]
    assert isinstance(second, ValueError)


def test_a_caller_alone_is_not_made_to_wait_and_several_are_waited_for():
    sizes = []

    def run(images):
        sizes.append(len(images))
        return list(images)

    async def main():
        batcher = Batcher([run], max_batch=8, max_delay=60, max_queue=100)
        for _ in range(3):
            await batcher.submit(ones(1))  # a minute each, if it waited for a full batch
        await asyncio.gather(*(batcher.submit(ones(1)) for _ in range(3)))
        later = [asyncio.create_task(batcher.submit(ones(1))) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert sum(sizes) == 6, "the last batch had three, so the two wait for a third"
        await asyncio.gather(*later, batcher.submit(ones(1)))
        await batcher.stop()

    together(main())
    assert sizes == [1, 1, 1, 3, 3]


def test_a_network_that_has_work_waits_for_nobody():
    go = threading.Event()

    def run(images):
        go.wait(10)
        return list(images)

    async def main():
        batcher = Batcher([run], max_batch=4, max_delay=60, max_queue=100)
        full = asyncio.create_task(batcher.submit(ones(4)))
        await asyncio.sleep(0)
        late = asyncio.create_task(batcher.submit(ones(1)))
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(full, late)
        await batcher.stop()

    together(main())


def test_a_full_queue_is_busy_and_has_room_again_later():
    go = threading.Event()

    def run(images):
        go.wait(10)
        return list(images)

    async def main():
        batcher = Batcher([run], max_batch=2, max_delay=0.0, max_queue=4)
        first = asyncio.create_task(batcher.submit(ones(4)))
        await asyncio.sleep(0.05)
        with pytest.raises(Busy):
            await batcher.submit(ones(1))
        go.set()
        assert len(await first) == 4
        assert len(await batcher.submit(ones(4))) == 4
        assert batcher.queued == 0
        await batcher.stop()
        with pytest.raises(Busy, match="stopping"):
            await batcher.submit(ones(1))

    together(main())


def test_stopping_finishes_what_was_taken():
    async def main():
        batcher = Batcher([lambda images: [float(x) for x in images]], max_batch=1, max_delay=0.0, max_queue=50)
        tasks = [asyncio.create_task(batcher.submit(ones(5))) for _ in range(4)]
        await asyncio.sleep(0)
        await batcher.stop()
        return await asyncio.gather(*tasks)

    assert together(main()) == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 4


def test_a_failure_reaches_those_who_asked_and_nobody_else():
    def run(images):
        if float(images[0]) == 0:
            raise ValueError("bad batch")
        return [float(x) for x in images]

    async def main():
        batcher = Batcher([run], max_batch=2, max_delay=0.0, max_queue=50)
        with pytest.raises(ValueError, match="bad batch"):
            await batcher.submit(ones(5))
        assert batcher.queued == 0
        assert await batcher.submit(ones(2, 7)) == [7.0, 8.0]
        await batcher.stop()

    together(main())


def test_a_failing_batch_whose_caller_gave_up_is_not_run_again():
    calls, go = [], threading.Event()

    def run(images):
        calls.append(len(images))
        go.wait(10)
        raise ValueError("bad batch")

    async def main():
        batcher = Batcher([run], max_batch=4, max_delay=0.0, max_queue=50)
        gone = asyncio.create_task(batcher.submit(ones(1)))
        await asyncio.sleep(0.05)
        gone.cancel()
        await asyncio.sleep(0)
        go.set()
        await asyncio.sleep(0.1)
        assert (calls, batcher.queued) == ([1], 0)
        await batcher.stop()

    together(main())


def test_images_whose_callers_gave_up_are_not_computed():
    calls, begun, go = [], threading.Event(), threading.Event()

    def run(images):
        calls.append(images.flatten().tolist())
        begun.set()
        go.wait(10)
        return list(images)

    async def main():
        batcher = Batcher([run], max_batch=2, max_delay=0.0, max_queue=50)
        first = asyncio.create_task(batcher.submit(ones(4)))
        await asyncio.to_thread(begun.wait, 10)
        second, third = (asyncio.create_task(batcher.submit(ones(1, start))) for start in (10, 20))
        await asyncio.sleep(0)
        for gone in (first, second):
            gone.cancel()
        await asyncio.sleep(0)
        go.set()
        await third
        await batcher.stop()
        assert batcher.queued == 0

    together(main())
    assert calls == [[0.0, 1.0], [20.0]]


def test_a_caller_that_gives_up_leaves_no_trace():
    async def main():
        batcher = Batcher([lambda images: [float(x) for x in images]], max_batch=4, max_delay=0.2, max_queue=50)
        gone = asyncio.create_task(batcher.submit(ones(1)))
        await asyncio.sleep(0.01)
        gone.cancel()
        assert await batcher.submit(ones(2, 5)) == [5.0, 6.0]
        await batcher.stop()
        assert batcher.queued == 0

    together(main())


# The command, in a process of its own.


@pytest.fixture
def running(detector, tmp_path):
    detector.save(tmp_path / "detector.kedge")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "kedge", "serve", str(tmp_path / "detector.kedge"), "--port", str(port)]
    process = subprocess.Popen(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    address = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            httpx.get(f"{address}/readyz", timeout=1)
            break
        except httpx.TransportError:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
    yield process, address
    process.kill()
    process.wait(timeout=10)


def test_many_clients_at_once_get_their_own_answers_and_a_stop_finishes_them(detector, running):
    process, address = running
    images = [png(n) for n in range(24)]
    scores = [float(detector([Image.open(io.BytesIO(data))]).score[0]) for data in images]
    answers: dict[int, httpx.Response] = {}

    def ask(number):
        with httpx.Client(timeout=30) as http:
            kind = {"Content-Type": "image/png"}
            answers[number] = http.post(f"{address}/v1/score", content=images[number], headers=kind)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(images))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[n].status_code for n in range(24)] == [200] * 24
    told = [answers[n].json()["results"][0]["score"] for n in range(24)]
    assert told == pytest.approx(scores, rel=1e-4)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    assert "Traceback" not in process.stderr.read()


def test_the_port_that_was_free_is_told_and_answers_go_out_at_once(detector, tmp_path, monkeypatch):
    detector.save(tmp_path / "detector.kedge")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(warnings, "filterwarnings", lambda *_, **__: None)
    ports = []

    def run(server, sockets):
        ports.extend(taken.getsockname()[1] for taken in sockets)
        assert sockets[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        sockets[0].close()

    monkeypatch.setattr("uvicorn.Server.run", run)
    done = CliRunner().invoke(app, ["serve", str(tmp_path / "detector.kedge"), "--port", "0", "--threads", "1"])
    assert done.exit_code == 0, done.output
    assert ports[0] > 0
    assert f"http://127.0.0.1:{ports[0]} " in done.output


@pytest.mark.parametrize(("host", "reason"), [("127.0.0.1", "in use"), ("no such.host", ""), ("a..b", "")])
def test_a_place_that_cannot_be_taken_is_told_before_anything_is_loaded(host, reason):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        done = CliRunner().invoke(app, ["serve", "none.kedge", "--host", host, "--port", port])
    with pytest.raises(InputError, match=rf"host and port must be .*{re.escape(host)}, port {port} cannot .*{reason}"):
        raise done.exception


def test_json_answers_are_strict_json(detector):
    with client(detector) as http:
        text = http.post("/v1/score", content=png(), headers={"Content-Type": "image/png"}).text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
