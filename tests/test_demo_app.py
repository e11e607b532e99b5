"""``kedge demo --app``: the page of an earlier demo, with its images."""

import json

from fastapi.testclient import TestClient

import kedge
from helpers import images, network, run_cli
from kedge.studies.commands import demo


def test_it_serves_the_detector_that_is_there_with_images_of_every_set(tmp_path, monkeypatch):
    detector = (
        kedge.MSP(network(channels=1)).fit(images(channels=1, side=28)).calibrate(images(seed=1, channels=1, side=28))
    )
    detector.save(tmp_path / "detector.kedge")
    (tmp_path / "metrics.json").write_text(json.dumps({"record": {"seed": 3}}))
    served = []
    monkeypatch.setattr(demo, "run_service", lambda make, settings, **address: served.append((make(), address)))
    monkeypatch.setattr(demo, "_run", lambda *_: served.append("trained anew"))
    done = run_cli("demo", "--out", tmp_path, "--app", "--port", 0)
    assert done.exit_code == 0, done.output
    ((app, address),) = served
    assert address == {"host": "127.0.0.1", "port": 0}
    with TestClient(app) as http:
        names = [example["name"].partition(":")[0] for example in http.get("/v1/background").json()["examples"]]
    assert {"digits 0 to 7", "digits 8 and 9", "letters", "noise"} <= set(names)
