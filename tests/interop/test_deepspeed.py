"""DeepSpeed's folders are read as they are: what they hold is what DeepSpeed itself says, and bad ones are refused."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.interop.deepspeed_data import CASES, NUMBERS, expected, facts, root_of, states, write
from zstore.checkpoint.build import reshard_checkpoint
from zstore.checkpoint.reader import open_checkpoint
from zstore.errors import CheckpointMismatchError, CheckpointNotFoundError, CorruptionError, UsageError, ZstoreError
from zstore.io.memory import as_torch
from zstore.open.sources import open_source
from zstore.tools.inspect import inspect_command
from zstore.tools.options import Common
from zstore.tools.verify import verify_command

CLIENT = {"client/tensor", "client/numpy.state"}


@pytest.mark.parametrize("case", CASES)
def test_every_value_is_the_one_that_deepspeed_gives(case: str) -> None:
    wanted, about, random = expected(case), facts(case)["case"], np.random.default_rng(0)
    with open_source(root_of(case)) as source:
        names = set(wanted)
        if about.get("zero", {}).get("round_robin_gradients"):  # see the script: nothing says what the moments are
            trained = [n for n in wanted if n.startswith("model/") and "frozen" not in n]
            names |= {n.replace("model", f"optimizer/{slot}", 1) for n in trained for slot in ("exp_avg", "exp_avg_sq")}
        assert set(source.arrays) - CLIENT == names
        for name, value in wanted.items():
            found = as_torch(source.read_array(name))
            assert found.shape == value.shape, name
            # DeepSpeed gathers the parts of the fp32 state in fp32, so this is a comparison of bits.
            assert torch.equal(found.to(value.dtype), value), name
            if name.startswith("optimizer/") or (name.startswith("model/") and "frozen" not in name):
                assert found.dtype == torch.float32
        for name, array in source.arrays.items():  # parts of the whole, of any range
            whole = source.read_array(name).reshape(-1)
            first, stop = sorted(random.integers(0, array.spec.numel + 1, 2).tolist())
            part = np.empty(stop - first, whole.dtype)
            source.read(name, first, stop, part)
            assert part.tobytes() == whole[first:stop].tobytes()
        for stop, out in ((array.spec.numel + 1, part), (1, np.empty(2, np.float64))):
            with pytest.raises(UsageError):
                source.read(name, 0, stop, out)
        assert source.arrays["model/embed.weight"].spec.aliases == ("head.weight",)
        assert source.record.step == 3
        assert source.record.training_world_size == about["world_size"]
        engine = source.record.state["engine"]
        assert engine["counters"]["global_steps"] == 3
        assert engine["batch"]["train_batch_size"] == 6
        assert engine["precision"] == about.get("precision", "fp32")
        # Where DeepSpeed wraps the optimizer at stage 0, it takes a step of zeros as it begins.
        began = about["stage"] == 0 and about.get("precision", "fp32") != "fp32"
        assert engine["scalars"]["embed.weight"]["step"] == 3 + began
        assert len(engine["groups"]) == (2 if about.get("groups") else 1)


def test_inspect_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    case = "stage3-nvme-groups-2"
    root, version = root_of(case), facts(case)["deepspeed"]
    inspect_command(str(root), Common(json=True))
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoint"]["kind"] == f"DeepSpeed {version}, stage 3, bf16, with offloaded state"
    assert (found["checkpoint"]["step"], found["checkpoint"]["training_world_size"]) == (3, 2)
    assert {array["name"] for array in found["arrays"]} == set(expected(case))
    inspect_command(str(root), Common())
    assert f"DeepSpeed {version}" in capsys.readouterr().out
    with pytest.raises(UsageError, match="which has no checksums"):
        verify_command(str(root))


def step_of(location: Path, tag: str | float | None = None) -> tuple[str, int]:
    with open_source(location, tag) as source:
        return source.tag, source.record.step


def test_a_tag_is_found_by_latest_by_name_and_by_its_folder(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        write(tmp_path, model={"global_steps": step}, tag=f"global_step{step}")
    assert step_of(tmp_path) == ("global_step9", 9)
    assert step_of(tmp_path, "global_step2") == ("global_step2", 2)
    assert step_of(tmp_path / "global_step10") == ("global_step10", 10)
    (tmp_path / "latest").unlink()
    assert step_of(tmp_path) == ("global_step10", 10)
    (tmp_path / "latest").write_text("global_step77\n")
    with pytest.raises(CheckpointNotFoundError, match=r"`latest` names; it has .*'global_step10'"):
        open_source(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="'nothing'; it has"):
        open_source(tmp_path, "nothing")
    for text in ("../elsewhere", "/etc", "a/b", "", "\xff\x00"):
        (tmp_path / "latest").write_bytes(text.encode("latin1"))
        with pytest.raises(CorruptionError, match="does not name a tag"):
            open_source(tmp_path)


def test_a_run_is_carried_over(tmp_path: Path) -> None:
    write(tmp_path)
    with open_source(tmp_path) as source:
        assert source.read_array("model/w").tolist() == NUMBERS[:20].reshape(4, 5).tolist()
        assert source.read_array("optimizer/exp_avg_sq/b").tolist() == (NUMBERS[20:] * 3).tolist()
        assert source.read_array("buffer/m").tolist() == [1.0, 1.0]
        engine = source.record.state["engine"]
    assert engine["counters"] == {"global_steps": 9, "skipped_steps": 2, "micro_steps": 9}
    assert engine["batch"] == {"train_batch_size": 8, "micro_batch_size": 4, "accumulation_steps": 1}
    assert engine["scalars"]["w"] == {"step": 7.0, "updates": 7.0}
    assert engine["groups"] == [{"lr": 0.1, "betas": [0.9, 0.99]}]
    assert engine["data_position"] == 72


def test_the_clients_state_comes_as_json_and_arrays() -> None:
    with open_source(root_of("stage2-fp16-1")) as source:
        client = source.record.state["client_state"]
        assert client == {
            "epoch": 2,
            "best": float("inf"),
            "tensor": {"$tensor": "client/tensor"},
            "numpy": {"state": {"$tensor": "client/numpy.state"}, "scalar": 0.5},
            "shape": [2, 3],
        }
        assert source.read_array("client/tensor").tolist() == [[0, 1, 2], [3, 4, 5]]
        assert source.read_array("client/numpy.state").tolist() == [0, 1, 2, 3]


def test_what_is_not_carried_over_is_named(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    write(tmp_path, model={"loop": loop, "raw": b"bytes", "keys": {1: "a"}, "data_sampler": {"x": 1}})
    with open_source(tmp_path) as source:
        assert source.record.state["client_state"]["keys"] == {"1": "a"}
        text = "; ".join(source.notes)
    for named in ("client_state: loop", "client_state: raw (bytes)", "'data_sampler'", "random number generators"):
        assert named in text


def test_numbers_of_a_schedule_that_are_tensors_are_carried_over(tmp_path: Path) -> None:
    tensors = {"last_epoch": torch.tensor(9), "best": torch.tensor(0.5), "more": torch.ones(2)}
    schedule = {**tensors, "warm": True, "step": 3}
    write(tmp_path, model={"lr_scheduler": schedule})
    with open_source(tmp_path) as source:
        found = source.record.state["engine"]["schedule"]
        assert "lr_scheduler: client/lr_scheduler.more" in source.notes
    assert (found["last_epoch"], found["best"], found["warm"], found["step"]) == (9.0, 0.5, True, 3)


@pytest.mark.parametrize("groups", [0, 1, 2])
def test_flat_masters_without_a_group_are_noted(groups: int, tmp_path: Path) -> None:
    masters = [NUMBERS[:20], NUMBERS[20:]]
    optimizer = {
        "fp32_groups_flat": masters,
        "optimizer_state_dict": {
            "state": {number: {"exp_avg": master * 2} for number, master in enumerate(masters)},
            "param_groups": [{"lr": 0.1, "params": [number]} for number in range(groups)],
        },
    }
    write(tmp_path, model={"optimizer": optimizer}, ranks=[])
    with open_source(tmp_path) as source:
        assert ("optimizer/exp_avg/w" in source.arrays) == (groups == 2)
        assert (f"2 flat masters for {groups} parameter groups" in "; ".join(source.notes)) == (groups < 2)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ("mp_rank_01_model_states.pt", "tensor or pipeline parallel"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor or pipeline parallel"),
        ("layer_00-model_00-model_states.pt", "pipeline parallel"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "expert parallel"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "expert parallel"),
        ({"mp_world_size": 2}, "tensor parallel"),
        ({"checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 4}}, "tensor parallel"),
        ({"checkpoint_parallel_dimensions": {"pp_degree": 2, "tp_degree": 1}}, "pipeline parallel"),
        ({"num_experts": [8]}, "expert parallel"),
        ({"ds_autoep_layers": [{"x": 1}]}, "expert parallel"),
        ([states(0) | {"partition_count": [2, 1]}, states(1)], r"expert parallel.*\[1, 2\] ranks"),
    ],
)
def test_parallel_layouts_are_refused_by_their_files_and_states(tmp_path: Path, changed: Any, what: str) -> None:
    ranks, model = (changed if isinstance(changed, kind) else None for kind in (list, dict))
    folder = write(tmp_path, model=model, ranks=ranks)
    if isinstance(changed, str):
        (folder / changed).touch()
    with pytest.raises(CheckpointMismatchError, match=f"{what}.*Export its weights"):
        open_source(tmp_path)


def test_missing_mixed_and_left_over_ranks_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path)
    one = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    one.rename(folder / "bf16_zero_pp_rank_7_mp_rank_00_optim_states.pt")
    with pytest.raises(CorruptionError, match=r"optimizer states of 1 of 2 ranks are missing \(ranks 1\)"):
        open_source(tmp_path)
    shutil.copy(folder / "bf16_zero_pp_rank_7_mp_rank_00_optim_states.pt", one)
    with pytest.raises(CorruptionError, match="optimizer states of 3 ranks, but 2 trained"):
        open_source(tmp_path)
    (folder / "bf16_zero_pp_rank_7_mp_rank_00_optim_states.pt").rename(
        folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    )
    with pytest.raises(CorruptionError, match="two files of rank 1"):
        open_source(tmp_path)
    (folder / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CorruptionError):
        open_source(tmp_path)
    other = states(1)
    other["base_optimizer_state"]["state"][0]["step"] = torch.tensor(8.0)
    write(tmp_path / "mixed", ranks=[states(0), other])
    with pytest.raises(CorruptionError, match="different steps"):
        open_source(tmp_path / "mixed")


def test_without_any_optimizer_states_the_weights_are_read(tmp_path: Path) -> None:
    write(tmp_path, ranks=[])
    with open_source(tmp_path) as source:
        assert sorted(source.arrays) == ["buffer/m", "model/b", "model/w"]
        assert source.arrays["model/w"].spec.dtype == "bfloat16"


MODELS_THAT_DO_NOT_FIT: list[dict[str, Any]] = [
    {"param_shapes": [{"w": torch.Size([4, 6]), "b": torch.Size([3])}]},
    {"param_shapes": [{"w": torch.Size([4]), "b": torch.Size([3])}]},
    {"param_shapes": [{"w": torch.Size([2**30, 2**30]), "b": torch.Size([3])}]},
    {"param_shapes": [{"w": torch.Size([4, 5]), "b": torch.Size([3])}, {"c": torch.Size([1])}]},
    {"param_shapes": [{"w": [4, 5]}]},
    {"param_shapes": {"w": torch.Size([4, 5])}},
    {"param_shapes": [{7: torch.Size([23])}]},
    {"module": [1]},
    {"global_steps": -1},
    {"global_steps": "many"},
]
RANKS_THAT_DO_NOT_FIT: list[dict[str, Any]] = [
    {"single_partition_of_fp32_groups": []},
    {"single_partition_of_fp32_groups": [torch.zeros(5)]},
    {"single_partition_of_fp32_groups": [torch.zeros(12).double()]},
    {"single_partition_of_fp32_groups": ["text"]},
    {"base_optimizer_state": None},
    {"base_optimizer_state": {"state": {}, "param_groups": []}},
]


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for number, changed in enumerate(MODELS_THAT_DO_NOT_FIT):
        write(tmp_path / f"model-{number}", model=changed)
    for number, changed in enumerate(RANKS_THAT_DO_NOT_FIT):
        write(tmp_path / f"ranks-{number}", ranks=[states(0), states(1) | changed])
    for folder in tmp_path.iterdir():
        with pytest.raises(CorruptionError):
            open_source(folder)


@pytest.mark.parametrize("case", ["stage2-fp32-3", "stage3-nvme-groups-2", "universal-stage1-2"])
def test_every_file_that_is_missing_or_cut_is_noticed(case: str, tmp_path: Path) -> None:
    def read_all() -> None:
        with open_source(copy) as source:
            for name in source.arrays:
                source.read_array(name)

    # What a universal folder has of parameters that are not trained is in the model states too, and read there.
    unused = {"shift", "numbers", "head.weight", "frozen.weight", "frozen.bias"}
    files = [p for p in root_of(case).rglob("*") if p.suffix in (".pt", ".swp") and p.parent.name not in unused]
    for number, file in enumerate(files):
        copy = tmp_path / str(number)
        shutil.copytree(root_of(case), copy, ignore=shutil.ignore_patterns("expected.*"))
        victim = copy / file.relative_to(root_of(case))
        os.truncate(victim, victim.stat().st_size // 2 if file.suffix == ".pt" else 8)  # the others are mostly padding
        with pytest.raises(ZstoreError, match="global_step3"):
            read_all()
        victim.unlink()
        if file.name not in ("optimizer_state.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt"):
            with pytest.raises(ZstoreError):
                read_all()
        shutil.rmtree(copy)


def test_names_are_no_paths(tmp_path: Path) -> None:
    evil = "../../../evil"
    shapes = {evil: torch.Size([4, 5]), "/b": torch.Size([3])}
    module = {evil: torch.zeros(4, 5).bfloat16(), "/b": torch.zeros(3).bfloat16(), "..": torch.ones(2)}
    write(tmp_path / "theirs", model={"param_shapes": [shapes], "module": module, "buffer_names": [".."]})
    with open_source(tmp_path / "theirs") as source:
        assert f"model/{evil}" in source.arrays
        reshard_checkpoint(source, tmp_path / "deep" / "out", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "theirs"]
    with open_checkpoint(tmp_path / "deep" / "out") as ours:
        assert ours.read_array(f"model/{evil}").tolist() == NUMBERS[:20].reshape(4, 5).tolist()
