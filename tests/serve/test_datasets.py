"""`/xarray`: xarray opens checkpoints, and what it gets is what `/zarr` has but for names of dimensions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import ml_dtypes
import numpy as np
import pytest
import urllib3
import xarray

from tests.checkpoint.checkpoints import open_world
from tests.serve.conftest import Serve
from zstore.serve.files.dimensions import named
from zstore.serve.server import serving
from zstore.serve.settings import Root, Settings

RNG = np.random.default_rng(4)
ARRAYS = {
    "model/h.0.weight": RNG.random((48, 48)).astype(np.float32),
    "model/h.0.bias": RNG.random(48).astype(ml_dtypes.bfloat16),
    "model/odd name/x%": np.arange(30),
    "model/cube": RNG.random((6, 5, 6)),
    "model/scalar": np.array(2.5),
    "model/large": RNG.random((3, 5, 7, 120_000)).astype(np.float16),  # chunks of 4 MiB end within its extents
    "optimizer/exp_avg/h.0.weight": RNG.random((48, 48)).astype(np.float32),
}
DIMENSIONS = {
    "h.0.weight": ("n48", "n48_1"),
    "h.0.bias": ("n48",),
    "odd%20name%2Fx%25": ("n30",),
    "cube": ("n6", "n5", "n6_1"),  # its Zarr array in the checkpoint has two extents
    "scalar": (),
    "large": ("n3", "n5", "n7", "n120000"),
}
PLAIN = [{"name": "bytes", "configuration": {"endian": "little"}}]
FOLDERS = {name: name.replace("odd name/x%", "odd%20name%2Fx%25") for name in ARRAYS}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with a checkpoint of two ranks."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    with open_world(ARRAYS, world_size=2) as world:
        world.save(folder, step=1)
    return folder


@pytest.fixture(scope="module")
def base(run: Path) -> Iterator[str]:
    with serving(Settings(roots=(Root.parse(str(run.parent)),), port=0)) as url:
        yield url


def test_xarray_opens_groups_and_whole_checkpoints(run: Path, base: str) -> None:
    url = f"{base}/xarray/one/step-00000001"
    tree = xarray.open_datatree(url, engine="zarr")
    model, nested = xarray.open_zarr(f"{url}/model"), xarray.open_zarr(url, group="model")
    listed = xarray.open_zarr(f"{url}/model", consolidated=False)
    moments = xarray.open_zarr(f"{base}/xarray/one/latest/optimizer/exp_avg")
    assert {str(name): each.dims for name, each in model.data_vars.items()} == DIMENSIONS
    assert {node.path for node in tree.subtree} == {"/", "/model", "/optimizer", "/optimizer/exp_avg"}
    for name, values in ARRAYS.items():
        group, _, variable = FOLDERS[name].rpartition("/")
        for dataset in (model, nested, tree["model"]) if group == "model" else (moments, tree[group]):
            found = dataset[variable]
            assert found.dtype == values.dtype
            assert np.array_equal(found.values, values)
    assert np.array_equal(model["h.0.weight"][5:7, ::3], ARRAYS["model/h.0.weight"][5:7, ::3])
    assert np.array_equal(listed["h.0.weight"], ARRAYS["model/h.0.weight"])
    assert np.array_equal(model["large"][1:, 3, 2:5, ::999], ARRAYS["model/large"][1:, 3, 2:5, ::999])


def test_only_names_of_dimensions_differ(run: Path, base: str, http: urllib3.PoolManager) -> None:
    def get(path: str, prefix: str = "xarray", method: str = "GET", **headers: str) -> urllib3.BaseHTTPResponse:
        url = f"{base}/{prefix}/one/step-00000001/{path.replace('%', '%25')}"
        return http.request(method, url, headers=headers, redirect=False)

    tag = run / "step-00000001"
    root = json.loads((tag / "zarr.json").read_text())["consolidated_metadata"]["metadata"]
    for path in (str(path.relative_to(tag)) for path in tag.rglob("*") if path.is_file()):
        there, here = get(path), get(path, "zarr")
        assert there.status == here.status == 200
        if not path.endswith("zarr.json"):
            assert (there.data, there.headers["etag"]) == (here.data, here.headers["etag"])
            part = get(path, range="bytes=3-9")
            assert (part.status, part.data) == (206, here.data[3:10])
            continue
        assert there.headers["content-length"] == str(len(there.data))
        assert there.headers["content-type"] == "application/json"
        document, etag = there.json(), there.headers["etag"]
        inner = document.get("consolidated_metadata", {}).get("metadata", {})
        group = path.removesuffix("zarr.json")
        if document["node_type"] == "group":
            assert set(inner) == {entry.removeprefix(group) for entry in root if entry.startswith(group)}
        for entry in (document, *inner.values()):
            if entry["node_type"] == "array":
                folder = FOLDERS[entry["attributes"]["zstore"]["name"]].rpartition("/")[2]
                assert tuple(entry.pop("dimension_names")) == DIMENSIONS[folder]
        true = [ARRAYS[entry["attributes"]["zstore"]["name"]].shape for entry in inner.values() if "shape" in entry]
        assert [tuple(entry["shape"]) for entry in inner.values() if "shape" in entry] == true
        unfolded = [
            name for name, entry in inner.items() if entry["codecs" if "codecs" in entry else "node_type"] == PLAIN
        ]
        assert {name.rpartition("/")[2] for name in unfolded} <= {"cube", "scalar", "large"}
        inner.update({name: root[group + name] for name in unfolded})
        assert inner == {name: root[group + name] for name in inner}
        if document.get("codecs") == PLAIN:
            continue
        if path != "zarr.json":
            document.pop("consolidated_metadata", None)
        assert document == here.json()
        head = get(path, method="HEAD")
        assert (head.status, head.data, head.headers["etag"]) == (200, b"", etag)
        assert head.headers["content-length"] == there.headers["content-length"]
        assert get(path, **{"if-none-match": etag}).status == 304
        part = get(path, range="bytes=-20")
        assert (part.status, part.data) == (206, there.data[-20:])
    for path, status in (("none/zarr.json", 404), ("../zarr.json", 404), ("model/zarr.json/x", 404), ("model", 307)):
        assert get(path).status == status, path
    index = get("model/").data.decode()
    assert f'<a href="{FOLDERS["model/odd name/x%"].replace("model/", "").replace("%", "%25")}/">' in index
    assert http.request("GET", f"{base}/xarray/other/latest/zarr.json").status == 404


def test_behind_urls_and_with_damage(run: Path, serve: Serve, http: urllib3.PoolManager) -> None:
    memory = fsspec.filesystem("memory")
    for path in run.rglob("*"):
        if path.is_file():
            memory.pipe_file(f"/xarray-files/one/{path.relative_to(run)}", path.read_bytes())
    memory.pipe_file("/xarray-files/one/step-00000001/model/cube/zarr.json", b'{"shape":[')
    base = serve("memory://xarray-files")
    model = xarray.open_zarr(f"{base}/xarray/one/latest/model")
    assert np.array_equal(model["cube"], ARRAYS["model/cube"])
    damaged = http.request("GET", f"{base}/xarray/one/latest/model/cube/zarr.json")
    assert (damaged.status, "is not JSON" in damaged.json()["error"]) == (422, True)
    memory.rm("/xarray-files", recursive=True)


@pytest.mark.parametrize(
    ("document", "names"),
    [
        ({"shape": []}, []), ({"shape": [0, 0, 0]}, ["n0", "n0_1", "n0_2"]), ({"shape": "x"}, None), ({}, None),
        ({"shape": [{}]}, None), ({"shape": [2], "dimension_names": ["mine"]}, ["mine"]),
        ({"shape": [2], "consolidated_metadata": {"metadata": [1]}}, ["n2"]),
        ({"shape": [2], "consolidated_metadata": {"metadata": {"a": 1}}}, ["n2"]),
    ],
)  # fmt: skip
def test_any_document_gets_what_it_can(document: dict[str, Any], names: list[str] | None) -> None:
    found = named(document)
    assert found.pop("dimension_names", None) == names
    assert found == {key: value for key, value in document.items() if key != "dimension_names"}
