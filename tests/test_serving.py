"""The service: answers equal the detector's, limits hold, and nothing that a client sends brings it down."""

import asyncio
import base64
import copy
import io
import json
import re
import signal
import socket
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from PIL import Image

import kedge
from helpers import encoded, images, labelled, network, picture, run_cli, service_process, small_amp
from kedge.cli.serve import _listening
from kedge.errors import InputError, KedgeWarning, NotReadyError
from kedge.serving import Batcher, Busy, Gallery, Settings, create_app
from kedge.serving.explain import predictions_by_anchor, thresholds
from kedge.serving.guard import Guard
from kedge.serving.metrics import WINDOW, Metrics

CLASSES = ("ant", "bee", "cow")
PNG = {"Content-Type": "image/png"}


def png(seed=0, **options):
    return encoded(picture(seed, **options))


@pytest.fixture(scope="module")
def detector():
    return small_amp()


@pytest.fixture(scope="module")
def http(detector):
    with client(detector) as http:
        yield http


def client(detector, **limits):
    return TestClient(create_app(detector, Settings(**limits)), raise_server_exceptions=False)


def expected(detector, *files):
    rows = detector([Image.open(io.BytesIO(data)) for data in files]).to_rows(CLASSES)
    close = {"probability": {"rel": 1e-4}, "score": {"rel": 1e-4}, "tau": {"abs": 1e-5}, "p_value": {}}
    return [
        row
        | {"name": f"images[{k}]", "error": None}
        | {key: pytest.approx(row[key], **within) for key, within in close.items()}
        for k, row in enumerate(rows)
    ]


def form(*files):
    return {"files": [("images", (f"{n}.png", data)) for n, data in enumerate(files)]}


def test_an_image_comes_as_a_body_a_form_or_base64_and_gets_the_detector_s_row(detector, http):
    one, two = png(1), png(2, size=(40, 30), mode="L")
    text = [base64.b64encode(data).decode() for data in (one, two)]
    requests = [{"content": one, "headers": PNG}, form(one, two), {"json": {"images": text}}]
    requests.append({"json": {"image": f"data:image/png;base64,{text[1]}"}})
    answers = [http.post("/v1/score", **request) for request in requests]
    assert [answer.status_code for answer in answers] == [200] * 4
    raw, several, many, single = (answer.json()["results"] for answer in answers)
    assert raw == expected(detector, one)
    assert several == many == expected(detector, one, two)
    assert single == expected(detector, two)
    json.loads(answers[0].text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_what_is_wrong_with_a_request_is_answered_and_so_is_the_next_one(http):
    for content, kind, code, words in [
        (b"", "image/png", 400, r"images\[0\] cannot be read as an image"),
        (b"no image", "image/png", 400, "cannot be read"),
        (png()[:60], "image/png", 400, r"images\[0\] cannot be read"),
        (png()[:16] + (60_000).to_bytes(4, "big") * 2 + png()[24:], "image/png", 400, "cannot be read"),
        (b"{", "application/json", 422, "must be JSON"),
        (b"[" * 100_000, "application/json", 413, "more values"),
        (b"[1]", "application/json", 422, 'must be {"image"'),
        (b'{"images": 3}', "application/json", 422, "must be a list"),
        (b'{"images": []}', "application/json", 400, "at least one"),
        (b'{"image": "", "images": []}', "application/json", 422, "must be"),
        (b"x=1", "application/x-www-form-urlencoded", 415, "content-type must be"),
        (b"nothing", "multipart/form-data", 422, "form cannot be read"),
        (b"--x\r\nnonsense", "multipart/form-data; boundary=x", 400, "at least one image"),
    ]:
        wrong = http.post("/v1/score", content=content, headers={"Content-Type": kind})
        assert wrong.status_code == code, content[:60]
        assert re.search(words, wrong.json()["detail"])
        assert "Traceback" not in wrong.text
        assert http.post("/v1/score", content=png(), headers=PNG).status_code == 200


def test_an_image_that_cannot_be_read_has_an_error_in_its_row_and_the_others_have_results(detector, http):
    good = base64.b64encode(png(1)).decode()
    answer = http.post("/v1/score", json={"images": [good, "%%%", base64.b64encode(b"text").decode(), 3, good]})
    first, *bad, last = answer.json()["results"]
    assert [first, last] == [
        row | {"name": name} for row in expected(detector, png(1)) for name in (row["name"], "images[4]")
    ]
    for place, (row, words) in enumerate(zip(bad, ("base64", "cannot be read", "got int"), strict=True), start=1):
        assert row["name"] == f"images[{place}]"
        assert re.match(rf"images\[{place}\] .*{words}", row["error"])
        assert {value for key, value in row.items() if key not in ("name", "error")} == {None}
        assert row.keys() == first.keys()
    (only,) = http.post("/v1/score", **form(b"text")).json()["results"]
    assert only["error"]
    assert http.post("/v1/explain", **form(b"text")).status_code == 400
    assert value(http.get("/metrics").text, "kedge_images_unreadable_total") >= 4


def test_size_pixels_and_number_are_limited(detector):
    with client(detector, max_bytes=5000, max_pixels=1000, max_images=3, max_queue=64) as http:
        for request, code, words in [
            ({"content": bytes(6000), "headers": PNG}, 413, "at most 5,000 bytes"),
            ({"content": iter([bytes(3000)] * 2), "headers": PNG}, 413, "at most 5,000 bytes"),
            ({"content": png(size=(100, 11), mode="1"), "headers": PNG}, 400, "at most 1,000 pixels; got 100 x 11"),
            ({"json": {"images": [base64.b64encode(png()).decode()] * 4}}, 413, "at most 3; got 4"),
            (form(*[png()] * 4), 413, "at most 3"),
        ]:
            answer = http.post("/v1/score", **request)
            assert answer.status_code == code
            assert words in answer.json()["detail"]


def test_a_token_is_required_if_there_is_one(detector):
    with client(detector, token="secret") as http:
        for given, code in [
            (None, 401), ("Bearer other", 401), ("secret", 401), ("Basic secret", 401), ("Bearer \xff", 401),
            ("Bearer secret", 200), ("bearer secret", 200), ("BEARER  secret", 200),
        ]:  # fmt: skip
            headers = {} if given is None else {"Authorization": given.encode("latin-1")}
            assert [http.get(f"/{path}", headers=headers).status_code for path in ("v1/info", "metrics")] == [code] * 2
        for address in ("/", "/healthz", "/readyz", "/openapi.json"):
            assert http.get(address).status_code == 200


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
    assert answer.json() == {"results": expected(detector, png(1))}
    assert value(text, 'kedge_requests_total{code="200"}') == 1


def test_the_page_is_in_no_frame_and_loads_nothing_from_elsewhere(http):
    page = http.get("/")
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"(?:src|href)=.https?:", page.text)
    assert [http.get(path).status_code for path in ("/docs", "/redoc")] == [404] * 2  # which load scripts


def test_info_health_and_the_description(detector, http):
    info = http.get("/v1/info").json()
    assert (info["method"], info["classes"], info["input"]) == ("amp", list(CLASSES), [3, 12, 12])
    assert (info["threshold"], info["alpha"]) == (detector.calibration.threshold, 0.05)
    assert info["passes_per_image"] == 3
    assert http.get("/healthz").json() == {"status": "alive"}
    assert http.get("/readyz").json() == {"status": "ready"}
    described = http.get("/openapi.json").json()
    bodies = described["paths"]["/v1/score"]["post"]["requestBody"]["content"]
    assert set(bodies) == {"image/*", "multipart/form-data", "application/json"}
    assert set(described["components"]["schemas"]["ResultRow"]["properties"]) == set(expected(detector, png())[0])


def test_a_detector_that_can_flag_nothing_has_no_threshold_to_show(detector):
    bare = copy.copy(detector)
    with pytest.warns(KedgeWarning, match="too few to flag any image"):
        bare.calibrate(torch.rand(5, 3, 12, 12))
    with client(bare) as http:
        assert [http.get(f"/v1/{path}").json()["threshold"] for path in ("info", "background")] == [None] * 2


# --- metrics --------------------------------------------------------------------------------------------------------


def value(text, name):
    return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"{name} "))


def test_metrics_count_what_was_answered_and_show_drift_in_memory_that_does_not_grow(detector):
    files = [png(n) for n in range(7)]
    flagged = sum(row["is_ood"] for row in expected(detector, *files))
    with client(detector) as http:
        http.post("/v1/score", **form(*files))
        http.post("/v1/score", content=b"", headers=PNG)
        before = http.get("/metrics").text
        for _ in range(3):  # the same image again and again: nothing like a calibration set
            http.post("/v1/score", **form(*[png(0)] * 60))
        after = http.get("/metrics").text
        assert http.app.state.service.metrics.drift.state()["bounded"]
    counts = {"images_total": 7, "images_flagged_total": flagged, "score_count": 7, "request_seconds_count": 2}
    counts |= {'requests_total{code="200"}': 1, 'requests_total{code="400"}': 1, "drift_alarm": 0}
    assert {name: value(before, f"kedge_{name}") for name in counts} == counts
    assert value(after, "kedge_drift_alarm") == 1
    assert value(after, "kedge_drift_log_wealth") > 4.6


def test_metrics_compare_the_newest_scores_with_the_calibration_and_forget_the_alarm():
    metrics, rng, values = Metrics(torch.arange(1000.0) / 1000), np.random.default_rng(0), []
    for shift in (0, 0, 0.5, 0):  # the calibration scores are uniform
        metrics.scored((shift + rng.random(WINDOW)).tolist(), 0)
        text = metrics.text().decode()
        values.append((value(text, "kedge_drift_window_p_value"), value(text, "kedge_drift_window_alarm")))
    p, alarms = zip(*values, strict=True)
    assert alarms == (0, 0, 1, 0)
    assert p[2] < 1e-6 < 0.01 < min(p[0], p[1], p[3])
    few = Metrics(torch.arange(19.0))  # too few for a window
    few.scored([9.0] * WINDOW, 0)
    assert value(few.text().decode(), "kedge_drift_window_p_value") == 1


# --- failures, lanes and explanations -------------------------------------------------------------------------------


def test_a_detector_that_fails_is_reported_to_the_log_and_not_to_the_client(detector, monkeypatch, caplog):
    divides, gives_nan, slow = create_app(detector), create_app(detector), create_app(detector, Settings(timeout=0.1))
    batcher = divides.state.service.batcher
    monkeypatch.setattr(batcher, "runs", [lambda images: 1 / 0] * len(batcher.runs))
    for weights in gives_nan.state.service.detector.net.parameters():
        weights.data.fill_(float("nan"))
    monkeypatch.setattr(slow.state.service.batcher, "runs", [lambda images: time.sleep(0.3)])
    answers = []
    for broken, paths in ((divides, ["score"]), (gives_nan, ["score", "explain"]), (slow, ["score"])):
        with TestClient(broken, raise_server_exceptions=False) as http:
            answers += [http.post(f"/v1/{path}", content=png(), headers=PNG) for path in paths]
    assert [answer.status_code for answer in answers] == [500, 500, 500, 504]
    assert not any(word in answer.text for answer in answers for word in ("Zero", "division", "NaN"))
    assert "ZeroDivisionError" in caplog.text
    assert "the network gives NaN or infinite logits" in caplog.text


def test_control_characters_are_escaped_in_the_log(detector, caplog):
    def fails(scope, receive, send):
        raise ZeroDivisionError

    http = TestClient(Guard(fails, create_app(detector).state.service))
    assert http.get("/%1b%5b31m%0aERROR").status_code == 500
    assert r"no answer to 'GET' '/\x1b[31m\nERROR'" in caplog.messages


def test_two_networks_answer_as_one(detector, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # of the machine; each network then has one
    app = create_app(detector)
    monkeypatch.undo()
    service, seen, explaining = app.state.service, [], []

    def watched(*given):
        explaining.append((service.places.taken, threading.current_thread().name))
        return predictions_by_anchor(*given)

    monkeypatch.setattr("kedge.serving.explain.predictions_by_anchor", watched)
    assert len(service.batcher.runs) == 2
    for number, run in enumerate(service.batcher.runs):
        service.batcher.runs[number] = lambda images, run=run: (
            seen.append((threading.current_thread().name, torch.get_num_threads())) or run(images)
        )
    files = [png(n) for n in range(40)]
    with TestClient(app) as http:
        answers = http.post("/v1/score", **form(*files)).json()["results"]
        metrics = http.get("/metrics").text
        explained = http.post("/v1/explain", content=png(1), headers=PNG).json()
    assert [answer["label"] for answer in answers] == [row["label"] for row in expected(detector, *files)]
    assert set(seen) == {("kedge-network-0_0", 1), ("kedge-network-1_0", 1)}
    assert "kedge_images_total 40.0" in metrics
    assert len(explained["anchors"]) == 3
    assert explaining == [(1, "kedge-network-0_0")]  # it takes a place, and the thread of a network
    assert torch.get_num_threads() == before


def test_an_explanation_is_the_row_and_the_prediction_under_each_anchor(detector, http):
    answer = http.post("/v1/explain", content=png(1), headers=PNG).json()
    background = http.get("/v1/background").json()
    assert [answer["result"]] == expected(detector, png(1))
    assert len(answer["anchors"]) == len(background["anchors"]) == 3
    assert {predicted["class"] for predicted in answer["anchors"]} <= set(CLASSES)
    assert answer["image"].startswith("data:image/png;base64,")
    likely = answer["classes"]
    assert likely[0]["class"] == answer["result"]["class"]
    assert likely == sorted(likely, key=lambda each: -each["probability"])
    assert sum(each["probability"] for each in likely) == pytest.approx(1)
    assert background["threshold"] == detector.calibration.threshold
    assert sum(background["shares"]) == pytest.approx(1)
    assert len(background["edges"]) == len(background["shares"]) + 1
    assert http.post("/v1/explain", **form(png(), png())).status_code == 422


def test_a_method_without_anchors_is_explained_without_them():
    with client(kedge.MSP(network(classes=3)).fit(images()).calibrate(images(seed=1))) as http:
        assert http.post("/v1/explain", content=png(), headers=PNG).json()["anchors"] == []
        assert [example["name"] for example in http.get("/v1/background").json()["examples"]] == ["noise", "stripes"]


def test_the_nearest_training_images_are_those_whose_features_have_the_smallest_angle():
    net, train = network(classes=4), labelled(30, side=12)
    detector = kedge.MSP(net).fit(train).calibrate(images(seed=1, side=12))
    with TestClient(create_app(detector, gallery=Gallery(train, [labelled(5, name="others", side=12)]))) as http:
        answer = http.post(
            "/v1/explain", content=encoded(Image.fromarray(train.images[7].permute(1, 2, 0).numpy())), headers=PNG
        ).json()
        examples = http.get("/v1/background").json()["examples"]
    with torch.no_grad():
        z = torch.stack([net.features(net.as_input(x[None]), ["fc:in"])[1]["fc:in"][0] for x in train.images]).double()
    angle = (z @ z[7]) / (z.norm(dim=1) * z[7].norm())
    nearest = angle.argsort(descending=True)[:4].tolist()
    assert nearest[0] == 7
    assert [each["name"] for each in answer["nearest"]] == [train.classes[train.labels[i]] for i in nearest]
    assert decoded(answer["nearest"][0]["image"]).equal(train.images[7])
    assert [each["name"] for each in examples[:5]] == [
        f"others: {name}" for name in ("ant", "bee", "cow", "dog", "ant")
    ]


def decoded(address):
    data = base64.b64decode(address.partition(",")[2])
    return torch.from_numpy(np.array(Image.open(io.BytesIO(data)))).permute(2, 0, 1)


@pytest.mark.parametrize("delta", [None, 0.2])
def test_a_threshold_for_each_alpha_flags_what_a_calibration_at_that_alpha_flags(delta):
    held_out, others = images(99, seed=1), images(60, seed=2)
    detector = kedge.MSP(network()).fit(images()).calibrate(held_out, alpha=0.07, delta=delta)
    rows = thresholds(detector)
    assert [row["alpha"] for row in rows] == sorted(row["alpha"] for row in rows)
    assert 0.07 in {row["alpha"] for row in rows}
    for row in rows:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", KedgeWarning)
            flagged = copy.copy(detector).calibrate(held_out, alpha=row["alpha"], delta=delta)(others).is_ood
        limit = row["threshold"]
        assert flagged.tolist() == [limit is not None and s > limit for s in detector.score(others).double().tolist()]


def test_the_reason_is_there_for_an_image_that_only_a_lower_threshold_flags():
    detector = kedge.MSP(network(classes=3)).fit(images()).calibrate(images(seed=1), alpha=0.03)
    with client(detector) as http:
        answer = http.post("/v1/explain", content=png(1), headers=PNG).json()
    assert (answer["result"]["is_ood"], answer["result"]["reason"]) == (False, None)
    assert answer["reason"] == "between classes"


def test_a_detector_must_have_a_threshold_and_limits_must_make_sense():
    with pytest.raises(NotReadyError, match="no threshold yet"):
        create_app(kedge.AMP(network("anchored")).fit(images()))
    for limits in ({"max_queue": 10}, {"timeout": 0}):
        with pytest.raises(InputError, match=next(iter(limits))):
            Settings(**limits)


# --- the batcher ----------------------------------------------------------------------------------------------------


def batching(work, *runs, **limits):
    """Run ``work(batcher)`` and stop the batcher; afterwards nothing is queued."""

    async def main():
        batcher = Batcher(runs, **{"max_batch": 8, "max_delay": 0.0, "max_queue": 100} | limits)
        result = await work(batcher)
        await batcher.stop()
        assert batcher.queued == 0
        return result

    return asyncio.run(asyncio.wait_for(main(), 20))


def ones(count, start=0):
    return [torch.tensor([float(start + n)]) for n in range(count)]


def floats(images):
    return [float(x) for x in images]


class Recorded:
    """A network that records its batches, and waits for ``go`` where it has one."""

    def __init__(self, go=None, answer=floats):
        self.batches, self.begun, self.go, self.answer = [], threading.Event(), go, answer

    def __call__(self, images):
        self.batches.append(images.flatten().tolist())
        self.begun.set()
        if self.go is not None:
            assert self.go.wait(10)
        return self.answer(images)

    @property
    def sizes(self):
        return [len(batch) for batch in self.batches]


def fail(images):
    time.sleep(0.05)
    raise ValueError("bad network")


def later(batcher, *sizes):
    return [asyncio.create_task(batcher.submit(ones(n, 10 * k))) for k, n in enumerate(sizes)]


def test_callers_share_batches_of_half_of_what_waits_and_get_their_own_answers():
    run = Recorded(answer=lambda images: time.sleep(0.02) or [2 * float(x) for x in images])
    sizes = (1, 2, 3, 11, 1)
    answers = batching(lambda b: asyncio.gather(*later(b, *sizes)), run, max_delay=0.05)
    assert answers == [[2.0 * (10 * k + i) for i in range(n)] for k, n in enumerate(sizes)]
    assert (sum(run.sizes), max(run.sizes), len(run.sizes)) == (18, 8, 3)  # 18 images in batches of eight

    async def many_callers_then_one(batcher):
        await asyncio.gather(*later(batcher, *[1] * 32))
        await batcher.submit(ones(32))

    run = Recorded()
    batching(many_callers_then_one, run, max_batch=64, max_delay=0.05)
    assert run.sizes == [16, 8, 8, 32], "the last has one caller, who gains nothing by halves"


def test_two_networks_work_at_the_same_time_and_a_failure_in_one_leaves_the_other_at_work():
    both = threading.Barrier(2)  # passes only if the other network has a batch too
    run = Recorded(answer=lambda images: both.wait(10) * 0 or floats(images))
    assert batching(lambda b: b.submit(ones(32)), run, run, max_batch=64) == [float(n) for n in range(32)]
    first, second = batching(lambda b: asyncio.gather(*later(b, 8, 8), return_exceptions=True), floats, fail)
    assert first == [float(n) for n in range(8)]
    assert isinstance(second, ValueError)


def test_a_caller_alone_does_not_wait_and_several_are_waited_for_unless_there_is_work():
    run, busy = Recorded(), Recorded(threading.Event())

    async def work(batcher):
        for _ in range(3):
            await batcher.submit(ones(1))  # a minute each, if it waited for a full batch
        await asyncio.gather(*later(batcher, 1, 1, 1))
        two = later(batcher, 1, 1)
        await asyncio.sleep(0.05)
        assert sum(run.sizes) == 6, "the last batch had three, so the two wait for a third"
        await asyncio.gather(*two, batcher.submit(ones(1)))

    async def work_is_waiting(batcher):
        tasks = later(batcher, 4, 1)
        await asyncio.sleep(0.01)
        busy.go.set()
        await asyncio.gather(*tasks)

    batching(work, run, max_delay=60)
    assert run.sizes == [1, 1, 1, 3, 3]
    batching(work_is_waiting, busy, max_batch=4, max_delay=60)


def test_a_full_queue_is_busy_a_failure_reaches_its_callers_and_stopping_answers_what_was_accepted():
    run = Recorded(threading.Event())

    async def full(batcher):
        (first,) = later(batcher, 4)
        await asyncio.sleep(0.05)
        with pytest.raises(Busy):
            await batcher.submit(ones(1))
        run.go.set()
        assert len(await first) == len(await batcher.submit(ones(4))) == 4

    async def failing(batcher):
        with pytest.raises(ValueError, match="bad network"):
            await batcher.submit(ones(5))
        assert batcher.queued == 0
        assert await batcher.submit(ones(2, 7)) == [7.0, 8.0]

    async def stopping(batcher):
        tasks = later(batcher, 5, 5, 5, 5)
        await asyncio.sleep(0)
        await batcher.stop()
        with pytest.raises(Busy, match="stopping"):
            await batcher.submit(ones(1))
        return await asyncio.gather(*tasks)

    batching(full, run, max_batch=2, max_queue=4)
    batching(failing, lambda images: fail(images) if float(images[0]) == 0 else floats(images), max_batch=2)
    assert batching(stopping, floats, max_batch=1) == [[10.0 * k + n for n in range(5)] for k in range(4)]


def test_images_whose_callers_gave_up_are_not_computed():
    run, failing = Recorded(threading.Event()), Recorded(threading.Event(), fail)

    async def cancel(*tasks):
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0)

    async def while_others_wait(batcher):
        (first,) = later(batcher, 4)
        await asyncio.to_thread(run.begun.wait, 10)
        second, third = (asyncio.create_task(batcher.submit(ones(1, start))) for start in (10, 20))
        await asyncio.sleep(0)
        await cancel(first, second)
        run.go.set()
        return await third

    async def before_a_failure(batcher):
        (gone,) = later(batcher, 1)
        await asyncio.to_thread(failing.begun.wait, 10)
        await cancel(gone)
        failing.go.set()
        await asyncio.sleep(0.1)

    async def before_a_batch(batcher):
        (gone,) = later(batcher, 1)
        await asyncio.sleep(0.01)
        await cancel(gone)
        return await batcher.submit(ones(2, 5))

    assert batching(while_others_wait, run, max_batch=2) == [20.0]
    assert run.batches == [[0.0, 1.0], [20.0]]
    batching(before_a_failure, failing, max_batch=4)
    assert failing.sizes == [1]
    assert batching(before_a_batch, floats, max_batch=4, max_delay=0.2) == [5.0, 6.0]


# --- the command, in a process of its own ---------------------------------------------------------------------------


def test_many_clients_at_once_get_their_own_answers_and_sigterm_ends_it(detector, tmp_path):
    files = [png(n) for n in range(24)]
    with service_process(detector, tmp_path) as (process, port, log), ThreadPoolExecutor(24) as clients:
        post = partial(httpx.post, f"http://127.0.0.1:{port}/v1/score", headers=PNG, timeout=60)
        answers = list(clients.map(lambda data: post(content=data), files))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    assert [answer.status_code for answer in answers] == [200] * 24
    scores = [answer.json()["results"][0]["score"] for answer in answers]
    assert scores == [row["score"] for row in expected(detector, *files)]
    assert "Traceback" not in log.read_text()


def test_the_free_port_is_printed_and_answers_go_out_at_once(detector, tmp_path, monkeypatch):
    detector.save(tmp_path / "detector.kedge")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(warnings, "filterwarnings", lambda *_, **__: None)
    ports = []

    def run(server, sockets):
        ports.extend(taken.getsockname()[1] for taken in sockets)
        assert sockets[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        sockets[0].close()

    monkeypatch.setattr("uvicorn.Server.run", run)
    done = run_cli("serve", tmp_path / "detector.kedge", "--port", "0", "--threads", "1")
    assert done.exit_code == 0, done.output
    assert ports[0] > 0
    assert f"http://127.0.0.1:{ports[0]}\n" in done.output


@pytest.mark.parametrize(("host", "reason"), [("127.0.0.1", "in use"), ("no such.host", ""), ("a..b", "")])
def test_an_address_that_cannot_be_used_is_refused_before_anything_is_loaded(host, reason):
    with _listening("127.0.0.1", 0) as busy:  # by another service, which loads its detector
        port = str(busy.getsockname()[1])
        done = run_cli("serve", "none.kedge", "--host", host, "--port", port)
    with pytest.raises(InputError, match=rf"--host and --port must .*{re.escape(host)}, port {port} cannot .*{reason}"):
        raise done.exception
