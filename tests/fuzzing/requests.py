"""Bodies of requests, and whole requests to the service."""

import asyncio
import base64
import json
import math

from fuzzing.damage import altered, any_of, damaged
from fuzzing.engine import Cases, target
from fuzzing.images import FILES, PIXELS, SIDE, damaged_image
from helpers import small_amp
from kedge.errors import InputError
from kedge.serving import Settings, create_app
from kedge.serving.bodies import from_form, from_json

FORM_HEAD = b'\r\nContent-Disposition: form-data; name="images"; filename="a"\r\nContent-Type: image/png\r\n\r\n'


def form(parts, boundary=b"x") -> bytes:
    return b"".join(b"--" + boundary + FORM_HEAD + part + b"\r\n" for part in parts) + b"--" + boundary + b"--\r\n"


@target("multipart")
def multipart_cases(home) -> Cases:
    pieces = (b"\r\n", b"--x", b"\r\n--x", b"--", b"\r\n\r\n", FORM_HEAD, b"--x--\r\n", b"filename=", b"\0", b"a" * 999)
    field_part = b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\nfield\r\n"

    def case(rng, folder):
        parts = [b"".join(any_of(rng, pieces) for _ in range(rng.integers(4))) for _ in range(rng.integers(6))]
        parts = [part for part in parts if b"\r\n--x" not in b"\r\n" + part]
        body = b"".join(field_part for _ in range(rng.integers(3))) + form(parts)
        if rng.random() < 0.3:
            assert from_form(body, b"x", 8) == parts
            return True
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(len(body) + 1))
            body = body[:at] + any_of(rng, pieces) * int(any_of(rng, (1, 1, 2, 300))) + body[at:]
        body = damaged(rng, body, head=60)
        files = from_form(body, b"x", 8)
        assert len(files) <= 8
        assert all(file in body for file in files)
        assert sum(map(len, files)) <= len(body)
        return True

    yield case


@target("json")
def json_cases(home) -> Cases:
    texts = [base64.b64encode(data).decode() for data in (b"", b"a", b"hello", FILES[0])]
    texts += [f"data:image/png;base64,{text}" for text in texts]
    ends = (b"[" * 100_000, b'{"images":' * 20_000, b"9" * 10_000, b"\xff", b"\\ud800", b"1e999", b"NaN", b"\x00", b",")

    def case(rng, folder):
        chosen = [any_of(rng, texts) for _ in range(rng.integers(5))]
        value = {"images": chosen} if rng.random() < 0.7 else {"image": any_of(rng, texts)}
        how = rng.integers(4)
        if how == 1:
            value = altered(rng, value)
        body = json.dumps(value, indent=any_of(rng, (None, 1))).encode(any_of(rng, ("utf-8", "utf-8", "utf-16")))
        if how == 2:
            body = damaged(rng, body, head=30)
        if how == 3:
            at = int(rng.integers(len(body) + 1))
            body = body[:at] + any_of(rng, ends) + body[at:]
        files = from_json(body, 8)
        given = json.loads(body)
        wanted = [given["image"]] if "image" in given else given["images"]
        for file, text in zip(files, wanted, strict=True):
            if not isinstance(file, InputError):
                assert file == base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text)
        return True

    yield case


async def ask(app, body=b"", *, kind="image/png", method="POST", path="/v1/score", headers=(), cut=(), end="end"):
    """Status, headers and body of an answer.

    The body comes cut in pieces; after it comes its end, a disconnection (``"gone"``) or nothing (``"never"``).
    """
    pieces = [body[a:b] for a, b in zip([0, *cut], [*cut, len(body)], strict=True)]
    incoming = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    last = {"gone": {"type": "http.disconnect"}, "end": {"type": "http.request", "body": b"", "more_body": False}}
    incoming += [last[end]] if end in last else []
    sent = []

    async def receive():
        if incoming:
            return incoming.pop(0)
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    raw = [(b"content-type", kind.encode("latin-1"))] if kind is not None else []
    raw += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": raw,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"]), b"".join(part.get("body", b"") for part in sent[1:])


KINDS = ["image/png", "image/*", "IMAGE/JPEG; q=1", "application/octet-stream", "image/"]
BAD_KINDS = [None, "", "text/html", "\xff\x00", "multipart/form-data", "image", ";" * 1000, "a" * 10_000]
METHODS = ["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "\xff"]
PATHS = ["/v1/score/", "//v1/score", "/v1/../v1/score", "/v1/score\0", "/v1/explain", "/\U0001f6a2", "/docs/x"]
HEADERS = [
    ("content-length", "-1"), ("content-length", "\xb2"), ("content-length", "9" * 5000), ("expect", "x"),
    ("content-type", "application/json"), ("transfer-encoding", "chunked"), ("host", "\xff/"), ("host", "["),
    ("authorization", "Bearer \xff"), ("cookie", ";" * 5000), ("accept", "x/y"), ("x" * 5000, "y"),
]  # fmt: skip
REFUSED = {400, 404, 405, 413, 415, 422}


def hostile_request(rng) -> dict:
    files = [damaged_image(rng) if rng.random() < 0.4 else FILES[0] for _ in range(rng.integers(1, 4))]
    value = {"images": [base64.b64encode(data).decode() for data in files]}
    text = json.dumps(value).encode()
    bodies = [
        (files[0], any_of(rng, KINDS)),
        (files[0], any_of(rng, BAD_KINDS)),
        (text, "application/json"),
        (damaged(rng, text), "application/json"),
        (json.dumps(altered(rng, value)).encode(), "application/json; charset=utf-16"),
        (form(files), "multipart/form-data; boundary=x"),
        (damaged(rng, form(files)), damaged(rng, b'multipart/form-data; boundary="x"').decode("latin-1")),
    ]
    body, kind = any_of(rng, bodies)
    request = {"body": body, "kind": kind, "end": "gone" if rng.random() < 0.05 else "end"}
    for name, values, share in (("method", METHODS, 0.1), ("path", PATHS, 0.1), ("headers", HEADERS, 0.3)):
        if rng.random() < share:
            request[name] = [any_of(rng, values)] if name == "headers" else any_of(rng, values)
    if rng.random() < 0.3:
        request["cut"] = sorted(rng.integers(0, len(body) + 1, 3).tolist())
    return request


def no_constant(name):
    raise AssertionError(f"{name} is not JSON")


def check_answer(request, status, content):
    if request["end"] == "gone" and status == 499:
        return
    assert status in REFUSED | {200}, (request, status, content)
    if request.get("method") == "HEAD":
        return
    answer = json.loads(content, parse_constant=no_constant)
    if status != 200:
        assert isinstance(answer["detail"], str)
        assert "Traceback" not in answer["detail"]
        return
    for result in answer["results"] if "results" in answer else [answer["result"]]:
        if result.get("error"):
            assert "object at 0x" not in result["error"]
            continue
        assert all(math.isfinite(result[name]) for name in ("probability", "score", "tau", "p_value"))
        assert 0 < result["p_value"] <= 1
        assert 0 < result["probability"] <= 1 + 1e-6


@target("http")
def http_cases(home) -> Cases:
    # So small that 503 would come soon if a request left something behind.
    limits = Settings(timeout=600, max_pixels=PIXELS, max_bytes=100_000, max_held=100_000, max_images=8, max_queue=8)
    app = create_app(small_amp(side=SIDE), limits)
    with asyncio.Runner() as runner:
        lifespan = app.router.lifespan_context(app)
        runner.run(lifespan.__aenter__())

        def case(rng, folder):
            request = hostile_request(rng)
            status, _, content = runner.run(ask(app, **request))
            check_answer(request, status, content)
            assert app.state.service.batcher.queued == 0
            return status == 200

        yield case
        runner.run(lifespan.__aexit__(None, None, None))
