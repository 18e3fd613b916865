"""`/weights`: files that are made while they are downloaded are the ones that `zstore consolidate` writes."""

import json
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import torch
import transformers
import urllib3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from tests.checkpoint.checkpoints import Array, open_world, save_arrays
from tests.serve.conftest import Serve, needs_curl, serving_of
from zstore.checkpoint.reader import open_checkpoint
from zstore.tools.consolidate import consolidate_command
from zstore.weights.files import plan_files
from zstore.weights.from_checkpoint import DTYPES, list_weights, read_file

RNG = np.random.default_rng(9)
ARRAYS: dict[str, Array] = {
    "model/h.10.weight": RNG.standard_normal((700, 300)).astype(np.float32),
    "model/h.2.weight": RNG.standard_normal((300, 700)).astype(np.float32),
    "model/odd name/ü%": RNG.standard_normal(77),
    "model/none": np.zeros((0, 5), np.float16),
    "buffer/steps": np.arange(5, dtype=np.int8),
    "model/halves": RNG.standard_normal((130, 7)).astype(ml_dtypes.bfloat16),
    **{f"model/b.{i}": RNG.standard_normal(3).astype(np.float32) for i in range(20)},
}
FILE = "model.safetensors"
SHARDED = "max_shard_size=600kB"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    with open_world(ARRAYS, world_size=2) as world:
        world.save(folder, step=1)
        world.save(folder / "checkpoint-2", step=2)
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    (folder / "tokenizer.json").symlink_to(folder / "config.json")
    (folder / "secret.txt").write_text("no")
    return folder


@pytest.fixture(scope="module")
def base(run: Path) -> Iterator[str]:
    with serving_of(run.parent) as url:
        yield f"{url}/weights/one"


@pytest.fixture(scope="module")
def truth(run: Path) -> dict[str, Path]:
    """What `zstore consolidate` writes."""
    folders = {}
    for dtype in DTYPES:
        folders[dtype] = run.parent / dtype
        consolidate_command(run / "step-00000001", folders[dtype], dtype)
    folders["sharded"] = run.parent / "sharded"
    consolidate_command(run / "step-00000001", folders["sharded"], "bf16", 600_000)
    return folders


def get(url: str, **headers: str) -> urllib3.BaseHTTPResponse:
    with urllib3.PoolManager(retries=False, timeout=200) as pool:
        return pool.request("GET", url, headers={name.replace("_", "-"): value for name, value in headers.items()})


@pytest.mark.parametrize("dtype", [*DTYPES, None])
def test_a_file_is_the_one_that_consolidate_writes(dtype: str | None, base: str, truth: dict[str, Path]) -> None:
    expected = (truth[dtype or "fp16"] / FILE).read_bytes()
    url = f"{base}/step-00000001/{FILE}" + (f"?dtype={dtype}" if dtype else "")
    answer = get(url)
    assert (answer.status, answer.headers["Content-Length"]) == (200, str(len(expected)))
    assert answer.data == expected
    with urllib3.PoolManager(retries=False) as pool:
        head = pool.request("HEAD", url)
    assert {name: head.headers[name] for name in ("ETag", "Content-Length", "Accept-Ranges")} == {
        name: answer.headers[name] for name in ("ETag", "Content-Length", "Accept-Ranges")
    }
    for start, stop in ((0, 1), (7, 9), (4095, 4097), (4096, 5001), (len(expected) - 3, len(expected) + 9)):
        part = get(url, Range=f"bytes={start}-{stop - 1}")
        assert (part.status, part.data) == (206, expected[start:stop])
        assert part.headers["Content-Range"] == f"bytes {start}-{min(stop, len(expected)) - 1}/{len(expected)}"
    assert get(url, Range=f"bytes={len(expected)}-").status == 416
    assert get(url, If_None_Match=answer.headers["ETag"]).status == 304
    assert get(url, If_Range='"old"', Range="bytes=5-9").data == expected


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_range_in_blocks_of_any_size_is_the_files(data: st.DataObject, run: Path, truth: dict[str, Path]) -> None:
    dtype = data.draw(st.sampled_from(sorted(DTYPES)))
    expected = (truth[dtype] / FILE).read_bytes()
    start = data.draw(st.one_of(st.integers(0, len(expected)), st.integers(4000, 9000)))
    stop = min(len(expected), start + data.draw(st.one_of(st.integers(0, 200), st.integers(0, len(expected)))))
    block_bytes = data.draw(st.sampled_from([4096, 100_001, 1 << 20]))
    with open_checkpoint(run / "step-00000001") as reader:
        (layout,) = plan_files(list_weights(reader, DTYPES[dtype]), 10**9)
        blocks = list(read_file(reader, layout, start, stop, "error", block_bytes=block_bytes))
    assert b"".join(blocks) == expected[start:stop]
    assert all(0 < len(block) <= block_bytes for block in blocks)
    # Small weights share blocks; only the header's end and the first weights are not joined.
    assert sum(len(one) + len(next_one) <= block_bytes for one, next_one in pairwise(blocks)) <= 1


def test_numbered_files_their_index_and_what_lies_beside(base: str, truth: dict[str, Path]) -> None:
    query = f"dtype=bf16&{SHARDED}"
    folder = get(f"{base}/latest/?{query}").json()
    assert folder["checkpoint"] == "checkpoint-2/step-00000002"
    folder = get(f"{base}/step-00000001/?{query}").json()
    names = {path.name for path in truth["sharded"].iterdir()} - {
        "tokenizer.json"
    }  # a link, which a service does not follow
    assert {file["name"] for file in folder["files"]} == names
    assert len(folder["files"]) > 3
    for file in folder["files"]:
        answer = get(f"{base}/step-00000001/{file['name']}?{query}")
        assert answer.data == (truth["sharded"] / file["name"]).read_bytes()
        assert (len(answer.data), answer.headers["ETag"]) == (file["size"], file["etag"])


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        (f"step-00000009/{FILE}", 404, "step-00000009"),
        (f"step-00000001/{FILE}?{SHARDED}", 404, "model-00001-of-0000"),
        ("step-00000001/tokenizer.json", 404, "tokenizer.json"),  # a link
        ("step-00000001/secret.txt", 404, ""),
        ("step-00000001/../config.json", 404, ""),
        (f"latest/{FILE}?dtype=int8", 400, "'bf16', 'fp16' or 'fp32'"),
        (f"latest/{FILE}?max_shard_size=-1", 400, "size like 5GB"),
        (f"latest/{FILE}?overflow=wrap", 400, "'error', 'inf' or 'clamp'"),
        (f"latest/{FILE}?quality=9", 400, "quality"),
    ],
)
def test_what_is_not_there_is_said(path: str, status: int, text: str, base: str) -> None:
    with urllib3.PoolManager(retries=False) as pool:
        answer = pool.urlopen("GET", f"{base}/{path}", redirect=False)
    assert answer.status == status
    assert text in answer.json()["error"]


def test_latest_gives_ranges_of_the_file_that_was_begun_alone(base: str) -> None:
    url = f"{base}/latest/{FILE}"
    whole = get(url)
    assert get(url, Range="bytes=9-11").status == 200
    part = get(url, Range="bytes=9-11", If_Range=whole.headers["ETag"])
    assert (part.status, part.data) == (206, whole.data[9:12])


def test_values_that_do_not_fit_end_the_download_and_are_named_at_the_next(tmp_path: Path, serve: Serve) -> None:
    large = np.zeros((1200, 4096), np.float32)
    large[-1, -1], large[-1, -2] = 1e6, -np.inf
    save_arrays(tmp_path / "one", {"model/a": np.ones((1024, 1024), np.float32), "model/large": large})
    # More than a block, so that the first is sent before the last is made.
    url = f"{serve(tmp_path)}/weights/one/latest/{FILE}"
    with pytest.raises(urllib3.exceptions.ProtocolError, match="IncompleteRead"):
        get(url)
    assert (answer := get(url)).status == 422
    assert "large has values that float16 cannot hold" in answer.json()["error"]
    for overflow, value in (("inf", np.inf), ("clamp", 65504)):
        (tmp_path / FILE).write_bytes(get(f"{url}?overflow={overflow}").data)
        assert load_file(tmp_path / FILE)["large"][-1, -1] == value


def test_a_damaged_or_replaced_checkpoint_gives_no_wrong_byte(tmp_path: Path, serve: Serve) -> None:
    values = np.ones((1024, 1500), np.float32)
    save_arrays(tmp_path / "one", {"model/a": values, "model/b": values})
    url = f"{serve(tmp_path)}/weights/one/step-00000001/{FILE}?dtype=fp32"
    whole = get(url)
    shard = tmp_path / "one/step-00000001/model/b/c.0.0"
    data = bytearray(shard.read_bytes())
    data[-5000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(urllib3.exceptions.ProtocolError, match="IncompleteRead"):
        get(url)
    part = get(url, Range="bytes=4096-9999")
    assert part.data == whole.data[4096:10000]
    save_arrays(tmp_path / "one", {"model/a": values + 1, "model/b": values}, overwrite=True)
    again = get(url, Range="bytes=4096-9999", If_Range=whole.headers["ETag"])
    assert (again.status, len(again.data)) == (200, len(whole.data))
    assert again.headers["ETag"] != whole.headers["ETag"]


@needs_curl
def test_from_pretrained_after_a_download_that_went_on(tmp_path: Path, serve: Serve) -> None:
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    saved = save_arrays(tmp_path / "runs/one", {f"model/{name}": v.numpy() for name, v in model.state_dict().items()})
    config.save_pretrained(saved)
    url = f"{serve(tmp_path / 'runs', token='open-sesame-open')}/weights/one/step-00000001/"
    query, out = "dtype=fp32&max_shard_size=40kB", tmp_path / "pulled"
    out.mkdir()
    assert get(f"{url}?{query}").status == 401
    curl = ["curl", "-s", "-f", "-H", "Authorization: Bearer open-sesame-open"]
    folder = json.loads(subprocess.run([*curl, f"{url}?{query}"], check=True, capture_output=True).stdout)
    for file in folder["files"]:
        target, source = out / file["name"], f"{url}{file['name']}?{query}"
        subprocess.run([*curl, "-r", f"0-{file['size'] // 2}", "-o", target, source], check=True)
        subprocess.run([*curl, "-C", "-", "-H", f"If-Range: {file['etag']}", "-o", target, source], check=True)
        assert target.stat().st_size == file["size"]
    with safetensors.safe_open(next(out.glob("model-00001-*")), "np") as opened:
        assert opened.metadata() == {"format": "pt"}
    pulled = transformers.LlamaForCausalLM.from_pretrained(out)
    assert all(value.equal(pulled.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_lora_has_no_config_of_a_whole_model_as_from_consolidate(tmp_path: Path, serve: Serve) -> None:
    save_arrays(tmp_path / "one", {"model/base_model.model.q.lora_A.x.weight": np.ones(9, np.float32)})
    (tmp_path / "one/config.json").write_text("{}")
    files = get(f"{serve(tmp_path)}/weights/one/latest/").json()["files"]
    assert [file["name"] for file in files] == ["adapter_model.safetensors"]


def test_latest_is_the_one_that_an_edited_file_names(tmp_path: Path, serve: Serve) -> None:
    for number, tag in enumerate(("one", "two"), 1):
        save_arrays(tmp_path / "run", {"model/w": np.full(9, number, np.float32)}, step=number, tag=tag)
    url = f"{serve(tmp_path)}/weights/run/latest/{FILE}?dtype=fp32"
    for named, value in (("two", 2), ("one", 1), ("none", 2)):
        (tmp_path / "run" / "latest").write_text(f"{named}\n")
        (tmp_path / FILE).write_bytes(get(url).data)
        assert set(load_file(tmp_path / FILE)["w"]) == {value}
