"""`/zarr`: files of checkpoints over HTTP; the examples of the service's page and of reading from one run."""

import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote_to_bytes

import fsspec
import numpy as np
import pytest
import tensorstore
import urllib3
import zarr
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from tests.checkpoint.checkpoints import open_world, save_arrays
from tests.pages import blocks, code_of, text_of
from tests.serve.conftest import Serve, needs_curl, serving_of
from tests.serve.sample import RUN_ID, JournalWriter
from tests.tools.commands import done, here
from zstore.checkpoint.layout import new_save_id
from zstore.journal import read
from zstore.serve.files import choose

VALUES = np.random.default_rng(5).random((300, 700)).astype(np.float32)
ODD = np.arange(50.0)
JSON = {"Accept": "application/json"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    arrays = {"model/a.b": VALUES, "model/odd name/x": ODD}
    with open_world(arrays, world_size=2) as world:
        world.save(folder, step=1)
        world.save(folder / "checkpoint-2", step=2)
        world.save(folder, step=3)
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    (folder / "journal-ab.jsonl").write_text('{"kind": "start"}\n')
    (folder / "secret.txt").write_text("no")
    (folder / f"step-00000009.tmp-{new_save_id()}").mkdir()
    (folder / "no-record").mkdir()
    (folder / "no-record" / "zarr.json").write_text("{}")
    tag = folder / "step-00000001"
    os.chmod(tag, 0o755)
    (folder.parent / "outside").write_text("outside")
    (tag / "link").symlink_to(folder.parent / "outside")
    (tag / "linked").symlink_to(folder.parent)
    os.mkfifo(tag / "pipe")
    (folder / "linked").symlink_to(shutil.copytree(folder / "step-00000003", folder.parent / "elsewhere" / "copy"))
    (folder / "generation_config.json").symlink_to(folder.parent / "outside")
    return folder


@pytest.fixture(scope="module")
def base(run: Path) -> Iterator[str]:
    with serving_of(run.parent) as url:
        yield f"{url}/zarr/one"


def test_other_libraries_open_arrays_and_groups(base: str) -> None:
    group = zarr.open_group(f"{base}/step-00000003", mode="r")
    assert group.metadata.consolidated_metadata is not None
    assert np.array_equal(group["model/a.b"], VALUES)
    assert np.array_equal(group["model"]["odd%20name%2Fx"], ODD)  # its URL as the client's own path, not encoded again
    assert np.array_equal(zarr.open_array(f"{base}/checkpoint-2/step-00000002/model/a.b", mode="r"), VALUES)
    for where in ("latest", "step-00000001"):
        spec = {"driver": "zarr3", "kvstore": f"{base}/{where}/model/a.b/"}
        assert np.array_equal(tensorstore.open(spec, open=True).result().read().result(), VALUES)
    spec = {"driver": "zarr3", "kvstore": f"{base}/latest/model/odd%2520name%252Fx/"}
    assert np.array_equal(tensorstore.open(spec, open=True).result().read().result(), ODD)


def test_zarr_finds_members_by_listings_where_metadata_is_not_consolidated(base: str) -> None:
    fs = fsspec.filesystem("http")
    names = {name.rstrip("/").rpartition("/")[2] for name in fs.ls(f"{base}/step-00000003/model/", detail=False)}
    assert names == {"a.b", "odd%2520name%252Fx", "zarr.json"}
    group = zarr.open_group(f"{base}/step-00000003/model", mode="r", use_consolidated=False)
    assert {name: array.shape for name, array in group.arrays()} == {"a.b": (300, 700), "odd%2520name%252Fx": (50,)}


def test_every_file_of_a_checkpoint_comes_as_it_lies_on_disk(run: Path, base: str, http: urllib3.PoolManager) -> None:
    tag = run / "step-00000003"
    listing = http.request("GET", f"{base}/step-00000003/?recursive=1", headers=JSON).json()
    on_disk = {str(path.relative_to(tag)): path for path in tag.rglob("*") if path.is_file()}
    assert {f["name"]: f["size"] for f in listing["files"]} == {name: p.stat().st_size for name, p in on_disk.items()}
    for name, path in on_disk.items():
        answer = http.request("GET", f"{base}/step-00000003/{name.replace('%', '%25')}")
        assert (answer.status, answer.data) == (200, path.read_bytes())
        kind = "application/json" if name.endswith(".json") else "application/octet-stream"
        assert answer.headers["content-type"] == kind


def test_a_run_lists_what_is_visible(base: str, http: urllib3.PoolManager) -> None:
    listing = http.request("GET", f"{base}/", headers=JSON).json()
    assert listing["folders"] == ["checkpoint-2", "step-00000001", "step-00000003"]
    assert [file["name"] for file in listing["files"]] == ["config.json", "journal-ab.jsonl", "latest"]
    assert http.request("GET", f"{base}/latest").data == b"step-00000003\n"
    assert http.request("GET", f"{base}/config.json").json() == {"model_type": "tiny"}
    inside = http.request("GET", f"{base}/latest/", headers=JSON).json()
    assert inside == http.request("GET", f"{base}/step-00000003/", headers=JSON).json()
    assert inside["folders"] == ["manifest", "model"]
    every = http.request("GET", f"{base}/?recursive=1", headers=JSON).json()["files"]
    expected = {*listing["folders"], "latest", "config.json", "journal-ab.jsonl"}
    assert {file["name"].partition("/")[0] for file in every} == expected
    assert {"checkpoint-2/step-00000002/zstore.json"} < {file["name"] for file in every}
    page = http.request("GET", f"{base}/checkpoint-2/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert '<a href="step-00000002/">step-00000002/</a>' in page.data.decode()
    for folder in (base, f"{base}/step-00000003", f"{base}/step-00000003/model", f"{base}/checkpoint-2"):
        answer = http.request("GET", folder)
        assert (answer.status, answer.headers["location"]) == (307, f"./{folder.rpartition('/')[2]}/")


@pytest.mark.parametrize(
    "path",
    [
        "secret.txt", "no-record/zarr.json", "no-record/", "linked/zarr.json", "linked/", "generation_config.json",
        "step-00000001/link", "step-00000001/linked/outside", "step-00000001/linked/", "step-00000001/pipe",
        "step-00000001/zarr.json/", "step-00000001/zarr.json/x", "step-00000001/model/../zarr.json",
        "step-00000001/..%2fsecret.txt", "step-00000001/%2e%2e/secret.txt", "step-00000001/..%5csecret.txt",
        "step-00000001%2f..%2fsecret.txt", "..%2foutside", "%2e%2e/outside", "%2fetc%2fpasswd", "/etc/passwd",
        "step-00000001//etc/passwd", "step-00000001/%00", "step-00000001/zarr.json%00", "step-00000001/%ff%fe",
        "latest/../secret.txt", "latest/nothing", "nothing", "nothing/", "checkpoint-2/checkpoint-2/step-00000002/zarr.json",
        "checkpoint-9/step-00000002/zarr.json", "step-00000001/" + "x" * 400, "%252e%252e/outside", "./config.json/x",
    ],
)  # fmt: skip
def test_nothing_else_is_there(base: str, path: str) -> None:
    host, port = base.removeprefix("http://").split("/")[0].split(":")
    with socket.create_connection((host, int(port))) as connection:  # clients tidy up `..` before they send it
        connection.sendall(f"GET /zarr/one/{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 404 "), answer
    assert b"outside" not in answer.partition(b"\r\n\r\n")[2].replace(path.encode(), b"")


def test_what_a_save_has_under_way_is_not_there(run: Path, base: str, http: urllib3.PoolManager) -> None:
    temporary = next(run.glob("*.tmp-*"))
    shutil.copytree(run / "step-00000003", temporary, dirs_exist_ok=True)
    assert http.request("GET", f"{base}/{temporary.name}/zarr.json").status == 404


def test_a_replaced_checkpoint_is_found_by_tag(run: Path, base: str, http: urllib3.PoolManager, tmp_path: Path) -> None:
    shutil.copytree(run / "step-00000003", run / "step-00000005")
    first = http.request("GET", f"{base}/step-00000005/zarr.json")
    aside = run / f"step-00000005.old-{new_save_id()}"
    (run / "step-00000005").rename(aside)
    again = http.request("GET", f"{base}/step-00000005/zarr.json")
    assert (again.status, again.data, again.headers["etag"]) == (200, first.data, first.headers["etag"])
    assert "step-00000005" in http.request("GET", f"{base}/", headers=JSON).json()["folders"]
    assert http.request("GET", f"{base}/{aside.name}/zarr.json").status == 404
    save_arrays(tmp_path, {"model/a.b": VALUES}, step=5).rename(run / "step-00000005")
    replaced = http.request("GET", f"{base}/step-00000005/zarr.json", headers={"If-None-Match": first.headers["etag"]})
    assert replaced.status == 200
    assert replaced.data == (run / "step-00000005" / "zarr.json").read_bytes() != first.data
    shutil.rmtree(run / "step-00000005")
    shutil.rmtree(aside)
    assert http.request("GET", f"{base}/step-00000005/zarr.json").status == 404


@pytest.mark.parametrize(
    ("asked", "status", "start", "stop"),
    [
        ("bytes=0-9", 206, 0, 10), ("bytes=5-", 206, 5, None), ("bytes=-7", 206, -7, None), ("bytes=3-3", 206, 3, 4),
        ("bytes=0-99999999999", 206, 0, None), ("bytes=-99999999999", 206, 0, None), ("bytes=0-1,4-5", 200, 0, None),
        ("bytes=9-3", 200, 0, None), ("bytes=-", 200, 0, None), ("lines=0-3", 200, 0, None), ("bytes=x", 200, 0, None),
        ("bytes=99999999999-", 416, 0, 0), ("bytes=-0", 416, 0, 0),
    ],
)  # fmt: skip
def test_range(run: Path, base: str, http: Any, asked: str, status: int, start: int, stop: int | None) -> None:
    data = (run / "step-00000003" / "model" / "a.b" / "c.0.0").read_bytes()
    url = f"{base}/step-00000003/model/a.b/c.0.0"
    answer = http.request("GET", url, headers={"Range": asked})
    expected = data[start:stop]
    assert answer.status == status
    if status == 416:
        assert answer.headers["content-range"] == f"bytes */{len(data)}"
        return
    assert answer.data == expected
    assert answer.headers["content-length"] == str(len(expected))
    assert answer.headers["accept-ranges"] == "bytes"
    first = start % len(data)
    where = f"bytes {first}-{first + len(expected) - 1}/{len(data)}" if status == 206 else None
    assert answer.headers.get("content-range") == where
    head = http.request("HEAD", url, headers={"Range": asked})
    assert (head.status, head.headers["content-length"], head.data) == (200, str(len(data)), b"")
    assert head.headers["etag"] == answer.headers["etag"]


def test_tags_of_files_decide_what_is_sent(base: str, http: urllib3.PoolManager) -> None:
    url = f"{base}/step-00000003/zarr.json"
    tag = http.request("HEAD", url).headers["etag"]
    assert tag.startswith('"')
    for value in (tag, f'"x", {tag}', f"W/{tag}", "*"):
        answer = http.request("GET", url, headers={"If-None-Match": value})
        assert (answer.status, answer.data, answer.headers["etag"]) == (304, b"", tag)
    assert http.request("GET", url, headers={"If-None-Match": '"x"'}).status == 200
    assert http.request("GET", url, headers={"If-Match": '"x"'}).status == 412
    assert http.request("GET", url, headers={"Range": "bytes=0-3", "If-Range": tag}).status == 206
    assert http.request("GET", url, headers={"Range": "bytes=0-3", "If-Range": '"x"'}).status == 200
    assert http.request("GET", url, headers={"Range": "bytes=0-3", "If-Range": f"W/{tag}"}).status == 200
    assert http.request("POST", url).status == 405


def test_a_file_behind_a_url_is_served_like_a_local_one(run: Path, http: urllib3.PoolManager) -> None:
    memory = fsspec.filesystem("memory")
    for path in run.rglob("*"):
        if path.is_file() and not path.is_symlink() and "tmp" not in str(path.relative_to(run)):
            memory.pipe_file(f"/b-files/one/{path.relative_to(run)}", path.read_bytes())
    with serving_of("memory://b-files") as url:
        where = f"{url}/zarr/one"
        assert np.array_equal(zarr.open_group(f"{where}/latest", mode="r")["model/a.b"], VALUES)
        shard = (run / "step-00000003" / "model" / "a.b" / "c.1.0").read_bytes()
        answer = http.request("GET", f"{where}/step-00000003/model/a.b/c.1.0", headers={"Range": "bytes=-5000"})
        assert (answer.status, answer.data) == (206, shard[-5000:])
        listing = http.request("GET", f"{where}/step-00000003/model/", headers=JSON).json()
        assert (listing["folders"], [f["name"] for f in listing["files"]]) == (["a.b", "odd%20name%2Fx"], ["zarr.json"])
        for path in ("secret.txt", "no-record/zarr.json", "step-00000003/no"):
            assert http.request("GET", f"{where}/{path}", redirect=False).status == 404, path
        assert "etag" not in http.request("GET", f"{where}/config.json").headers
    memory.rm("/b-files", recursive=True)


@given(st.text("0123456789-,=byts ", max_size=20), st.integers(0, 100))
def test_any_range_gives_a_part_of_the_file(text: str, size: int) -> None:
    for header in (text, f"bytes={text}"):
        part = choose("GET", {"range": header}, '"tag"', size)
        assert part.status in (200, 206, 416)
        assert 0 <= part.start <= part.stop <= size
        assert part.status != 206 or part.nbytes > 0
        assert part.status != 200 or part.nbytes == size


def test_hostile_names_are_text_in_an_index(tmp_path: Path, serve: Serve, http: urllib3.PoolManager) -> None:
    names = ['"><img src=x onerror=alert(1)>', "a&b", "javascript:alert(1)", "%2e%2e", "\udcff", "a\nb", "ź"]
    folder = save_arrays(tmp_path / "one", {"model/a": np.arange(4.0)})
    for name in names:
        (folder / "model" / name).write_bytes(b"x")
    page = http.request("GET", f"{serve(tmp_path)}/zarr/one/latest/model/").data.decode()
    assert "<img" not in page
    links = re.findall(r'href="([^"]*)"', page)
    assert {os.fsdecode(unquote_to_bytes(link)) for link in links} == {*names, "a/", "zarr.json"}
    assert all(re.fullmatch(r"[A-Za-z0-9%._~/-]*", link) for link in links)  # relative, with no scheme


def test_runs_with_dots_or_newlines_in_names(tmp_path: Path, serve: Serve, http: urllib3.PoolManager) -> None:
    names = [".hidden", "two\nlines", "a\ttab"]
    for name in names:
        save_arrays(tmp_path / name, {"model/a": np.arange(4.0)})
    base = serve(tmp_path)
    listed = [run["name"] for run in http.request("GET", f"{base}/api/runs").json()["runs"]]
    assert sorted(listed) == sorted(names)
    for name in names:
        place = f"{base}/zarr/{quote(name, safe='')}/latest"
        np.testing.assert_array_equal(zarr.open_group(place, mode="r")["model/a"][:], np.arange(4.0))
        assert http.request("GET", f"{base}/api/runs/{quote(name, safe='')}/checkpoints").status == 200


@needs_curl
def test_the_examples_run(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weight = np.arange(32, dtype=np.float32).reshape(8, 4)
    save_arrays(tmp_path / "runs" / "gpt", {"model/0.weight": weight, "model/0.bias": np.ones(8, np.float32)})
    journal = JournalWriter(tmp_path / "runs" / "gpt" / f"journal-{RUN_ID}.jsonl", 1e9)
    journal.start(RUN_ID)
    journal.steps(5)
    base = serve(tmp_path / "runs")
    names: dict[str, Any] = {}
    ran: list[str] = []
    for language, block in code_of("docs/service.md"):
        code = block.replace("http://127.0.0.1:8700", base).replace("/data/runs", str(tmp_path / "runs"))
        if language == "python":
            exec(code, names)
            continue
        for line in code.replace("\\\n", " ").splitlines():
            program, *words = shlex.split(line)
            ran.append(f"{program} {words[0]}" if program == "zstore" else program)
            if program == "curl":
                subprocess.run([program, *words], check=True, timeout=200)
            elif words[0] != "serve":
                assert here(*words)[0] == 0
    assert ran == ["zstore serve", "curl", "zstore verify", "zstore consolidate"]
    for values in (names["weight"], names["same"], load_file("weights/model.safetensors")["0.weight"]):
        np.testing.assert_array_equal(values, weight)
    np.testing.assert_array_equal(names["first_rows"], weight[:2])
    downloaded = Path("weights/model.safetensors").read_bytes()
    assert downloaded == Path("consolidated/model.safetensors").read_bytes()
    assert names["losses"] == [line["loss"] for line in read(tmp_path / "runs/gpt") if line["kind"] == "step"]


def test_the_examples_of_remote_reading_run(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZSTORE_TOKEN", "open-sesame-open")
    values = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    save_arrays(tmp_path / "run", {"model/0.weight": values}, world_size=2, step=2)
    base = serve(tmp_path / "run", token="open-sesame-open")
    names: dict[str, Any] = {}
    exec(blocks("docs/remote.md")[-1].replace("http://store:8700", base), names)
    for line in blocks("docs/remote.md", "sh")[1].splitlines():
        done(line.replace("http://store:8700", base))
    assert np.array_equal(names["rows"], values[10:20])
    assert np.array_equal(names["first"], values[0])


def test_every_option_of_the_command_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    options = set(re.findall(r"--[a-z-]+", here("serve", "--help")[1])) - {"--help"}
    table = text_of("docs/service.md").partition("| option |")[2].partition("## Authentication")[0]
    assert {option for option in options if f"`{option}" not in table} == set()
