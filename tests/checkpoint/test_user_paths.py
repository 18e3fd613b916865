"""Paths of users: `~` is the home folder, a relative path means where the call was made, and modes follow the umask."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import zstore.dcp
from tests.checkpoint.checkpoints import save_arrays
from tests.engine.runs import make_config, start, step
from tests.tools.commands import here
from zstore import open_checkpoint, open_store
from zstore.engine.adapters.torch_optim import Offloaded
from zstore.errors import UsageError
from zstore.io import user_location, user_path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NUMEL = 70_000


def values(number: int) -> torch.Tensor:
    return torch.full((NUMEL,), float(number))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    return home


@pytest.mark.parametrize("text", ["~", "~/run", "~root", "~root/run", "run", ".", "run/./one", "/run", "a~b", "run/~"])
def test_a_path_is_the_one_that_a_shell_gives(home: Path, text: str) -> None:
    said = subprocess.run(["bash", "-c", f'printf %s "$PWD" " " {text}'], capture_output=True, text=True, check=True)
    here, expanded = said.stdout.split(" ", 1)
    expected = os.path.normpath(os.path.join(here, expanded))
    assert str(user_path(text)) == user_location(text) == str(user_path(Path(text))) == expected


def test_two_points_after_a_link_mean_the_folder_above_its_target(home: Path) -> None:
    (home / "runs" / "one").mkdir(parents=True)
    Path("link").symlink_to(home / "runs" / "one")
    (home / "runs" / "two").mkdir()
    assert os.path.samefile("link/../two", user_path("link/../two"))
    assert user_path("link/../two").name == "two"
    assert user_path("link/three") == Path.cwd() / "link" / "three"  # other links stay


@pytest.mark.parametrize("url", ["s3://bucket/~/run", "memory://x/../y", "simplecache::s3://b", "http://h:1/run@tag"])
def test_urls_stay_as_they_are(home: Path, url: str) -> None:
    assert user_location(url) == url


def test_what_is_no_path_is_refused(home: Path) -> None:
    with pytest.raises(UsageError, match=r"for ~nobody-here: write an absolute path.*here/~nobody-here/x"):
        user_path("~nobody-here/x")
    for given in (None, 3, b"run"):
        with pytest.raises(UsageError, match=r"expected a path as text or pathlib\.Path, got"):
            user_path(given)  # type: ignore[arg-type]


def save_zstore(folder: Path, number: int) -> None:
    save_arrays(folder, {"model/w": values(number).numpy()}, world_size=1, step=1)


def save_dcp(folder: Path, number: int) -> None:
    dcp.save({"w": values(number)}, checkpoint_id=folder, no_dist=True)


def save_safetensors(folder: Path, number: int) -> None:
    folder.mkdir(parents=True)
    save_file({"w": values(number)}, folder / "model.safetensors")


def by_open_checkpoint() -> Callable[[], Any]:
    opened = open_checkpoint("run")
    return lambda: opened[next(iter(opened))][:]


def by_dcp_reader() -> Callable[[], Any]:
    reader = zstore.dcp.Reader("run")

    def read() -> Any:
        state = {"model": {"w": torch.zeros(NUMEL)}}
        dcp.load(state, storage_reader=reader, no_dist=True)
        return state["model"]["w"]

    return read


def by_store() -> Callable[[], Any]:
    store = open_store()
    loading = store.load("run")

    def read() -> Any:
        with store:
            loading.wait()
            return store.get("model/w").wait()

    return read


READERS: dict[str, tuple[Callable[[Path, int], None], Callable[[], Callable[[], Any]]]] = {
    "open_checkpoint": (save_zstore, by_open_checkpoint),
    "dcp.Reader": (save_zstore, by_dcp_reader),
    "Store.load": (save_zstore, by_store),
    "open_checkpoint of DCP": (save_dcp, by_open_checkpoint),
    "open_checkpoint of safetensors": (save_safetensors, by_open_checkpoint),
}


@pytest.mark.parametrize("reader", READERS)
def test_relative_paths_are_read_after_a_chdir(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, begin = READERS[reader]
    for number in (1, 2):
        save(tmp_path / str(number) / "run", number)
    monkeypatch.chdir(tmp_path / "1")
    read = begin()
    monkeypatch.chdir(tmp_path / "2")
    assert np.asarray(read()).tobytes() == values(1).numpy().tobytes()


Writer = Callable[[str, Callable[[], None]], None]
"""Writes below a path; calls the function as soon as the path was taken."""


def trains(**keys: Any) -> Any:
    return start(make_config(1, **keys))


def save_by_engine(path: str, then: Callable[[], None]) -> None:
    with trains() as engine:
        step(engine)
        handle = engine.save_checkpoint(path, wait=False)
        engine.save_16bit_model(f"{path}/weights")
        then()
        handle.wait()


def offload(path: str, then: Callable[[], None]) -> None:
    with trains(tier="nvme", nvme=path) as engine:
        then()
        step(engine)


def keep_in_store(path: str, then: Callable[[], None]) -> None:
    with open_store(path) as store:
        then()
        store.put("w", values(1)).wait()
        assert torch.equal(store.get("w").wait(), values(1))


def save_by_store(path: str, then: Callable[[], None]) -> None:
    with open_store() as store:
        store.put("w", values(1)).wait()
        saving = store.checkpoint(f"{path}/one")
        then()
        saving.wait()


def save_by_dcp(path: str, then: Callable[[], None]) -> None:
    writer = zstore.dcp.Writer(f"{path}/one")
    then()
    dcp.save({"w": values(1)}, storage_writer=writer, no_dist=True)


def offloaded(path: str, then: Callable[[], None]) -> None:
    weight = torch.nn.Parameter(values(1))
    Path(path).expanduser().mkdir()
    with Offloaded(torch.optim.AdamW, [weight], path=path, device="nvme") as optimizer:
        then()
        weight.grad = values(2)
        optimizer.step()


def by_command(*words: str) -> Writer:
    def write(path: str, then: Callable[[], None]) -> None:
        source = Path.cwd().parent / "source"
        if not source.exists():
            save_zstore(source, 1)
        code, _, err = here(*(word.format(source=source, path=path) for word in words))
        assert code == 0, err
        then()

    return write


WRITERS: dict[str, Writer] = {
    "engine.save_checkpoint": save_by_engine,
    "nvme_path": offload,
    "open_store": keep_in_store,
    "Store.checkpoint": save_by_store,
    "dcp.Writer": save_by_dcp,
    "Offloaded": offloaded,
    "zstore consolidate": by_command("consolidate", "{source}", "{path}"),
    "zstore reshard": by_command("reshard", "{source}", "{path}"),
    "zstore reshard --compression": by_command("reshard", "{source}", "{path}", "--compression", "zstd"),
    "zstore convert": by_command("convert", "{source}", "{path}"),
    "zstore convert --to torch": by_command("convert", "{source}", "{path}", "--to", "torch"),
}


@pytest.fixture
def places(tmp_path: Path, home: Path) -> SimpleNamespace:
    other = tmp_path / "other"
    other.mkdir()
    return SimpleNamespace(here=Path.cwd(), other=other, home=home)


@pytest.mark.parametrize("mask", [0o027, pytest.param(0o002, marks=pytest.mark.soak)], ids=oct)
@pytest.mark.parametrize("writer", WRITERS)
def test_paths_and_modes(writer: str, mask: int, places: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(mask)
    try:
        Path("file").touch()
        Path("folder").mkdir()
        WRITERS[writer]("run", lambda: monkeypatch.chdir(places.other))
    finally:
        os.umask(before)
    assert not list(places.other.iterdir())
    expected = {path.is_dir(): path.stat().st_mode for path in (places.here / "file", places.here / "folder")}
    for path in (places.here / "run", *(places.here / "run").rglob("*")):
        mode = path.stat().st_mode
        assert mode in (expected[path.is_dir()], expected[path.is_dir()] & ~0o222), path


@pytest.mark.parametrize("writer", WRITERS)
def test_a_tilde_is_the_home_folder(writer: str, places: SimpleNamespace) -> None:
    WRITERS[writer]("~/run", lambda: None)
    assert (places.home / "run").exists()
    assert not list(places.here.glob("~*"))
