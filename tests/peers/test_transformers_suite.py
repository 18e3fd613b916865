"""transformers' own tests of its Trainer, through its DeepSpeed integration on zstore."""

import json
from pathlib import Path

import pytest

from tests.peers.suites import SOURCES, allowed_failures, passed

FETCH = """transformers' tests are not there:
git clone --depth 1 --filter blob:none --sparse https://github.com/huggingface/transformers tests/peers/sources/transformers
git -C tests/peers/sources/transformers sparse-checkout set tests/trainer tests/fixtures"""


def _config(stage: str, folder: Path) -> str:
    config = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
    config |= {"gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    offload = {"device": "nvme", "nvme_path": str(folder)}
    disk = {"stage": 3, "offload_optimizer": offload, "offload_param": offload}
    disk |= {"stage3_gather_16bit_weights_on_model_save": True}
    return json.dumps(config | {"zero_optimization": {"stage": 0} if stage == "nothing" else disk})


@pytest.mark.soak
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("stage", ["nothing", "disk"])
def test_what_passes_with_transformers_passes_on_zstore(tmp_path: Path, stage: str) -> None:
    folder = SOURCES / "transformers"
    if not (folder / "tests" / "trainer").is_dir():
        pytest.skip(FETCH)
    (tmp_path / "nvme").mkdir()
    wanted = passed(folder, ["tests/trainer"], tmp_path / "plain.xml", variables={})
    assert wanted
    found = passed(
        folder,
        ["tests/trainer"],
        tmp_path / "ours.xml",
        plugins=["replacing"],
        variables={"ZSTORE_CONFIG": _config(stage, tmp_path / "nvme")},
    )
    own = "transformers_on_disk" if stage == "disk" else "transformers_in_memory"
    allowed = {**allowed_failures("transformers"), **allowed_failures(own)}
    lost = {name for name in wanted - found if not any(name.endswith(end) for end in allowed)}
    assert not lost, "\n".join(sorted(lost))
    stale = {end for end in allowed if any(name.endswith(end) for name in found)}
    assert not stale, f"allowed to fail, but pass: {sorted(stale)}"
