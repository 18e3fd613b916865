"""`zstore.optim.Offloaded` saved into versions in a bucket, through DCP; torch's own optimizer goes on from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

import zstore.dcp
from tests.checkpoint.buckets import VersionedBucket
from tests.integrations.test_offloaded_ranks import app, digests, load, make_model, step
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.optim import Offloaded
from zstore.testing.ranks import run_ranks

pytest.importorskip("icechunk", reason="extra versions")
pytest.importorskip("moto", reason="extra test")
AdamW = torch.optim.AdamW


def frozen() -> nn.Module:
    """Of which the first layer stays as it is."""
    model = make_model()
    model[0].requires_grad_(requires_grad=False)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def train_and_save(rank: int, folder: str, url: str, options: dict[str, Any]) -> list[Any]:
    """Save twice, the second time while training goes on; then load both into torch's optimizer."""
    model, found = frozen(), []
    with Offloaded(AdamW, trained(model), path=folder, lr=1e-2) as optimizer:
        for number in (1, 2):
            step(model, optimizer, number)
            found.append(digests(model, optimizer))
            saved: Any = dcp.async_save(
                app(model, optimizer),
                storage_writer=zstore.dcp.Writer(f"{url}/step-{number}", storage_options=options, versions=True),
                async_stager=zstore.dcp.Stager(),
                process_group=torch_dist.new_group(backend="gloo"),
            )
            step(model, optimizer, 10 + number)
            optimizer.wait()
            saved.result(60)
    for number in (1, 2):
        other = frozen()
        torchs = AdamW(trained(other), lr=1e-2, fused=True)
        load(other, torchs, storage_reader=zstore.dcp.Reader(f"{url}/step-{number}", storage_options=options))
        found.append(digests(other, torchs))
    return found


def test_state_on_disk_is_saved_as_versions_and_torch_loads_it(server: dict[str, Any], tmp_path: Path) -> None:
    bucket = VersionedBucket(server, tmp_path)
    for saved_1, saved_2, loaded_1, loaded_2 in run_ranks(train_and_save, 2, str(tmp_path), bucket.url, server):
        assert (saved_1, saved_2) == (loaded_1, loaded_2)
        assert saved_1 != saved_2
    versions = bucket.folder.all()
    first, second = versions["step-1"].packs, versions["step-2"].packs
    frozen_bytes = 4 * 601 * 64
    assert sum(nbytes for pack, nbytes in second.items() if pack not in first) < sum(first.values()) - frozen_bytes
    with open_checkpoint(bucket.folder) as reader:
        assert verify_checkpoint(reader) == []
