"""Arrays that a store forgets again, or knows by another name: their space is free, their names too."""

from pathlib import Path
from typing import cast

import pytest

from tests.store.stores import LARGE, create, other_than
from zstore.errors import BudgetError, UsageError
from zstore.format.arrays import ArraySpec
from zstore.store import StoreOptions, TensorStore
from zstore.store.store import TierName
from zstore.testing.oracle import same_bits

TIERS = ["device", "host", "disk"]
MIB = 1024 * 1024


@pytest.mark.parametrize("tier", TIERS)
def test_a_removed_array_is_gone_and_its_name_is_free(store: TensorStore, tier: str, tmp_path: Path) -> None:
    kept = create(store, tier, name="model/kept")
    store.write("model/kept", kept).wait()
    values = create(store, tier)
    store.write("model/w", values)
    store.remove("model/w")
    assert store.names() == ["model/kept"]
    assert [path.name for path in tmp_path.rglob("*w.*.shard")] == []
    with pytest.raises(UsageError, match="no array 'model/w'"):
        store.read("model/w")
    create(store, tier, shape=(700, 500))
    assert not store.read("model/w").wait().any()
    assert same_bits(store.read("model/kept").wait(), kept)


@pytest.mark.parametrize("tier", TIERS)
def test_an_array_in_use_stays(store: TensorStore, tier: str) -> None:
    values = create(store, tier)
    store.write("model/w", values).wait()
    snapshot = store.snapshot()
    with pytest.raises(UsageError):
        store.remove("model/w")
    snapshot.release()
    passing = store.stream([["model/w"]])
    next(passing)
    with pytest.raises(UsageError, match="being changed"):
        store.remove("model/w")
    passing.close()
    store.remove("model/w")


def test_a_version_that_waits_for_the_next_goes_too(store: TensorStore, tmp_path: Path) -> None:
    values = create(store, "disk")
    store.write("model/w", values).wait()
    snapshot = store.snapshot()
    store.write("model/w", other_than(values)).wait()
    snapshot.release()
    assert len(list(tmp_path.rglob("*.shard"))) == 2
    store.remove("model/w")
    assert list(tmp_path.rglob("*.shard")) == []


def test_the_budget_has_the_room_again(tmp_path: Path) -> None:
    with TensorStore(StoreOptions(run_path=tmp_path, host_budget_bytes=6 * MIB)) as store:
        create(store, "host")
        with pytest.raises(BudgetError):
            create(store, "host", name="model/more")
        store.remove("model/w")
        create(store, "host", name="model/more")


def test_a_closed_store_has_nothing_to_remove(tmp_path: Path) -> None:
    store = TensorStore(StoreOptions(run_path=tmp_path))
    create(store, "disk")
    store.close()
    left = sorted(tmp_path.rglob("*"))
    store.remove("model/w")
    store.remove("model/never")
    assert sorted(tmp_path.rglob("*")) == left
    assert store.names() == ["model/w"]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("shape", [(600, 1000), (30, 20)])
def test_a_renamed_array_keeps_its_values(store: TensorStore, tier: TierName, shape: tuple[int, ...]) -> None:
    values = create(store, tier, shape=shape)
    store.write("model/w", values)
    assert store.rename("model/w", ArraySpec(name="other/v", shape=shape, dtype="float32"), tier=tier)
    assert store.names() == ["other/v"]
    assert same_bits(store.read("other/v").wait(), values)
    create(store, tier, shape=shape)
    assert not store.read("model/w").wait().any()
    snapshot = store.snapshot()
    later = store.write("other/v", other_than(values))
    snapshot.release()
    later.wait()
    assert same_bits(store.read("other/v").wait(), other_than(values))
    store.remove("other/v")
    assert store.names() == ["model/w"]


def test_an_array_that_would_rest_otherwise_is_not_renamed(store: TensorStore) -> None:
    create(store, "host")
    for dtype, tier in (("bfloat16", "host"), ("float32", "disk")):
        spec = ArraySpec(name="other/v", shape=LARGE, dtype=dtype)
        assert not store.rename("model/w", spec, tier=cast("TierName", tier))
    with pytest.raises(UsageError, match="exists already"):
        store.rename("model/w", ArraySpec(name="model/w", shape=LARGE, dtype="float32"), tier="host")
    passing = store.stream([["model/w"]])
    next(passing)
    with pytest.raises(UsageError, match="being changed"):
        store.rename("model/w", ArraySpec(name="other/v", shape=LARGE, dtype="float32"), tier="host")
    passing.close()
    assert store.names() == ["model/w"]
