"""What the service refuses of uploads: names that lead elsewhere, documents that lie, bytes that are others, and strangers."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import urllib3

from tests.checkpoint.checkpoints import save_arrays
from tests.serve.conftest import BEARER, TOKEN, Serve
from zstore.checkpoint.catalog import read_record
from zstore.checkpoint.format import Manifest, sha256

NAMES = {"model/a": np.arange(5000.0).reshape(50, 100), "optimizer/exp_avg/a": np.arange(70000, dtype=np.float32)}
A, MOMENTS = "model/a/c.0.0", "optimizer/exp_avg/a/c.0"
Document = dict[str, Any]
Change = Callable[[Document], object]


class Client:
    def __init__(self, base: str, runs: Path, checkpoint: Path, pool: urllib3.PoolManager) -> None:
        self.base, self.runs, self.checkpoint, self.pool = base, runs, checkpoint, pool

    def offer(self, **fields: Any) -> Document:
        names = ("zarr.json", "manifest/rank-00000.json")
        return {
            "run": "one",
            "record": (self.checkpoint / "zstore.json").read_text(),
            "documents": {name: (self.checkpoint / name).stat().st_size for name in names},
            "extras": {},
        } | fields

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        answer = self.pool.request(method, f"{self.base}/api/uploads{path}", body=data, headers={**BEARER, **headers})
        return answer.status, answer.json() if answer.data else None

    def begin(self, **fields: Any) -> str:
        status, state = self.ask("POST", "", self.offer(**fields))
        assert status == 200, state
        return f"/{state['id']}"

    def put(self, upload: str, file: str, data: bytes | None = None, **headers: str) -> tuple[int, Any]:
        return self.ask("PUT", f"{upload}/files/{file}", self.data(file) if data is None else data, **headers)

    def data(self, file: str) -> bytes:
        return (self.checkpoint / file).read_bytes()

    def plan(self, upload: str) -> tuple[int, Any]:
        for file in self.offer()["documents"]:
            self.put(upload, file)
        return self.ask("POST", f"{upload}/plan")

    def nothing_is_visible(self) -> None:
        assert self.pool.request("GET", f"{self.base}/api/runs", headers=BEARER).json()["runs"] == []
        assert {path.name for path in self.runs.iterdir()} <= {"one"}
        if (self.runs / "one").exists():
            assert [path.name for path in (self.runs / "one").iterdir()] == [".uploads"]


@pytest.fixture
def client(tmp_path: Path, url: str, http: urllib3.PoolManager) -> Client:
    return Client(url, tmp_path / "runs", save_arrays(tmp_path / "a", NAMES, run_id="run"), http)


def _record(**fields: Any) -> Change:
    def change(offer: Document) -> None:
        record = json.loads(offer["record"]) | fields
        del record["digest"]
        text = json.dumps(record, sort_keys=True, separators=(",", ":"))
        offer["record"] = json.dumps(record | {"digest": f"sha256:{sha256(text.encode())}"})

    return change


def _documents(**sizes: int) -> Change:
    return lambda offer: offer["documents"].update(sizes)


def _extra(name: str, size: int = 3, digest: str = "0" * 64) -> Change:
    return lambda offer: offer["extras"].update({name: {"bytes": size, "sha256": digest}})


def _set(**fields: Any) -> Change:
    return lambda offer: offer.update(fields)


RUNS = ["../x", ".x", "a/b", "api", "checkpoint-3", "", "x" * 300, "a\0b", "a\nb", "latest", "é", "a\\b"]
OFFERS: list[tuple[int, Change]] = [
    *((400, _set(run=name)) for name in RUNS),
    (422, _set(record="{}")),
    (422, _set(record="[" * 100_000)),
    (
        422,
        lambda offer: offer.update(
            record=offer["record"].replace('"step":1', '"step": 2').replace('"step": 1', '"step": 2')
        ),
    ),
    *((422, _record(tag=tag)) for tag in ("../x", "a/b", "", "..")),
    (422, _record(id="../../x")),
    (422, _record(world_size=10**9)),
    (422, _record(manifest_sha256=["x"])),
    (422, _record(metadata_sha256="../x")),
    (400, _documents(**{"../../x": 3})),
    (400, _documents(**{"manifest/rank-00001.json": 3})),
    (400, _documents(**{"zarr.json": 2**40})),
    (400, _documents(**{"zarr.json": -1})),
    (400, lambda offer: offer["documents"].pop("zarr.json")),
    *(
        (400, _extra(name))
        for name in ("../x", "a/b", ".x", "..", "", "zarr.json", "ZSTORE.json", "latest", "a\0", "x" * 300)
    ),
    (400, _extra("x", size=-1)),
    (400, _extra("x", size=2**60)),
    (400, _extra("x", digest="../x")),
    (400, lambda offer: [_extra(f"file-{number}")(offer) for number in range(1001)]),
    (400, _set(keep={"last": 0})),
    (400, _set(keep={"best": "loss"})),
    (400, _set(overwrite="yes")),
    (400, _set(more=1)),
    (507, _extra("x", size=2**40)),
]


def test_offers_that_lead_elsewhere_or_lie_are_refused(client: Client) -> None:
    for number, (expected, change) in enumerate(OFFERS):
        offer = client.offer()
        change(offer)
        status, answer = client.ask("POST", "", offer)
        if expected == 507 and status == 200:  # a drive of over a terabyte, where that fits
            status = client.ask("DELETE", f"/{answer['id']}")[0] and 507
        assert status == expected, (number, answer)
    for body in (b"", b"[", b"[]", b"\xff"):
        assert client.ask("POST", "", body)[0] == 400
    client.nothing_is_visible()


def _forged(client: Client, **fields: Any) -> tuple[Document, bytes, bytes]:
    """An offer whose manifest, or metadata, says something else, with digests that are right."""
    metadata, manifest = client.data("zarr.json"), client.data("manifest/rank-00000.json")
    if "metadata" in fields:
        document = json.loads(metadata)
        fields["metadata"](document["consolidated_metadata"]["metadata"])
        metadata = json.dumps(document).encode()
    if "shards" in fields:
        decoded = Manifest.decode(manifest, "")
        manifest = replace(decoded, shards=tuple(fields["shards"](list(decoded.shards)))).encode()
    record = replace(
        read_record(client.checkpoint), metadata_sha256=sha256(metadata), manifest_sha256=(sha256(manifest),)
    )
    sizes = {"zarr.json": len(metadata), "manifest/rank-00000.json": len(manifest)}
    return client.offer(record=record.encode().decode(), documents=sizes), metadata, manifest


FORGED: list[tuple[int, Document]] = [
    (422, {"shards": lambda shards: shards[1:]}),
    (422, {"shards": lambda shards: [*shards, shards[0]]}),
    (422, {"shards": lambda shards: [replace(shards[0], file_bytes=2**60), *shards[1:]]}),
    (422, {"shards": lambda shards: [replace(shards[0], crcs=()), *shards[1:]]}),
    (422, {"shards": lambda shards: [replace(shards[0], shard=5), *shards[1:]]}),
    (422, {"shards": lambda shards: [replace(shards[0], array="model/b"), *shards[1:]]}),
    (422, {"metadata": lambda arrays: arrays.pop("model/a")}),
    (422, {"metadata": lambda arrays: arrays.update({"../../x": arrays["model/a"]})}),
    (422, {"metadata": lambda arrays: arrays.update({"../x": arrays["model"]})}),
    (422, {"metadata": lambda arrays: arrays["model/a"].update(shape=[2**60, 2**60])}),
    (422, {"metadata": lambda arrays: arrays["model/a"]["attributes"]["zstore"].update(shape=[2**47])}),
]


def test_documents_that_lie_are_refused_before_anything_else_comes(client: Client) -> None:
    for number, (expected, fields) in enumerate(FORGED):
        offer, metadata, manifest = _forged(client, **fields)
        status, state = client.ask("POST", "", offer)
        assert status == 200
        upload = f"/{state['id']}"
        assert client.put(upload, "zarr.json", metadata)[0] == 201
        assert client.put(upload, "manifest/rank-00000.json", manifest)[0] == 201
        status, answer = client.ask("POST", f"{upload}/plan")
        assert status == expected, (number, answer)
        assert client.put(upload, A)[0] in (404, 422)
        assert client.ask("POST", f"{upload}/commit")[0] == 422
        assert client.ask("DELETE", upload)[0] == 204
    upload = client.begin(extras={"model": {"bytes": 3, "sha256": "0" * 64}})
    assert client.plan(upload)[0] == 400  # a file where a group of arrays lies
    client.nothing_is_visible()


def test_files_that_are_not_asked_for_are_refused(client: Client, tmp_path: Path) -> None:
    upload = client.begin()
    assert client.ask("POST", f"{upload}/plan")[0] == 400  # no documents yet
    assert client.put(upload, A)[0] == 400
    assert client.plan(upload)[0] == 200
    inside = ("model/a/c.1.0", "zstore.json", "model/zarr.json", "model/a/c.0.0/x")
    for file in (*inside, "%2e%2e/x", "..%2f..%2fx", "/etc/x"):
        assert client.put(upload, file, b"abc")[0] == 404, file
    for place in ("bytes 0-3/9", "bytes 0-4/*", "bytes 7-3/41000", "items 0-4/5", f"bytes 0-{'9' * 30}/5"):
        assert client.put(upload, A, bytes(5), **{"Content-Range": place})[0] == 400
    size = len(client.data(A))
    assert client.put(upload, A, b"abc", **{"Content-Range": f"bytes 500-502/{size}"})[0] == 409
    assert client.put(upload, A, bytes(9), **{"Content-Range": f"bytes 0-2/{size}"})[0] == 400
    assert client.put(upload, A, client.data(A) + b"x")[0] == 400
    assert client.put(upload, A, client.data(A)[:-1])[0] == 400
    status, answer = client.ask("POST", f"{upload}/commit")
    assert (status, "2 files are missing" in answer["error"]) == (422, True)
    assert client.ask("GET", f"{upload}?rank=x")[0] == 400
    assert client.ask("GET", f"/{'0' * 32}")[0] == 404
    assert client.ask("POST", f"{upload}/claims", {"files": {A: "0" * 64, "x": "0" * 64}})[0] == 404
    client.nothing_is_visible()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "runs"}


def test_bytes_that_are_others_are_dropped_and_asked_for_again(client: Client) -> None:
    upload = client.begin(extras={"note": {"bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}})
    assert client.put(upload, "zarr.json", b"x" * len(client.data("zarr.json")))[0] == 422
    assert client.plan(upload)[0] == 200
    data = client.data(A)
    # In the index, behind it, in a chunk, in its checksum, behind that.
    for place in (3, 100, 4096, 5000, 4096 + 40000, len(data) - 1):
        wrong = bytearray(data)
        wrong[place] ^= 4
        status, answer = client.put(upload, A, bytes(wrong))
        assert (status, "was dropped" in answer["error"]) == (422, True), place
        assert client.ask("GET", f"{upload}/files/{A}")[1]["received"] == 0
    assert client.put(upload, "note", b"abd")[0] == 422
    assert client.put(upload, A, data[:5000], **{"Content-Range": f"bytes 0-4999/{len(data)}"})[0] == 202
    assert client.ask("GET", f"{upload}/files/{A}")[1]["received"] == 5000
    rest = {"Content-Range": f"bytes 5000-{len(data) - 1}/{len(data)}"}
    assert client.put(upload, A, data[5000:], **rest)[0] == 201
    assert client.put(upload, A)[0] == 200  # it is there
    for file, content in ((MOMENTS, None), ("note", b"abc")):
        assert client.put(upload, file, content)[0] == 201
    client.nothing_is_visible()
    assert client.ask("POST", f"{upload}/commit")[0] == 200
    assert client.ask("POST", f"{upload}/commit")[0] == 404
    assert client.ask("POST", "", client.offer(extras={}))[1]["state"] == "committed"
    assert (client.runs / "one/step-00000001" / A).read_bytes() == data


def test_what_nobody_goes_on_with_is_removed(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.begin()
    monkeypatch.setattr("zstore.serve.uploads.inbox.MAX_IDLE_S", -1.0)
    assert client.ask("GET", "")[1]["uploads"] == []
    assert list(client.runs.iterdir()) == []


def test_a_run_that_is_removed_under_way_leaves_room_for_others(client: Client) -> None:
    client.begin()
    shutil.rmtree(client.runs / "one")
    assert client.plan(client.begin(run="two"))[0] == 200


def test_a_service_of_one_run_takes_its_uploads(tmp_path: Path, serve: Serve, http: urllib3.PoolManager) -> None:
    checkpoint = save_arrays(tmp_path / "a", NAMES, run_id="run")
    save_arrays(tmp_path / "mine", NAMES, run_id="run", step=2)
    base = serve("memory://bucket/far", tmp_path / "mine", token=TOKEN)
    client = Client(base, tmp_path, checkpoint, http)
    status, answer = client.ask("POST", "", client.offer(run="other"))
    assert (status, "save under the name of one that it serves (mine)" in answer["error"]) == (400, True)
    client.plan(client.begin(run="mine"))
    listed = http.request("GET", f"{base}/api/runs/mine/checkpoints", headers=BEARER).json()
    assert [one["tag"] for one in listed["checkpoints"]] == ["step-00000002"]
