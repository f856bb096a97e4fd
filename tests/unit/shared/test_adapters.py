# SPDX-License-Identifier: Apache-2.0
"""Two adapters of one name: whether they are the same is said by their files, not by where these lie."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

from unit.schedulers.kit import request
from vllm_ascend_pd.engine import request_hash
from vllm_ascend_pd.shared.adapters import adapter_identity

SIZES = (0, 100, 4096 * 256, 3_000_001)


def adapter(folder: Path, size: int, seed: int = 1, *, rank: int = 8, base: str = "/models/base") -> LoRARequest:
    """Write an adapter's files. Only `seed` and `rank` are of the adapter itself."""
    folder.mkdir(exist_ok=True)
    facts = {"base_model_name_or_path": base, "r": rank}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    (folder / "adapter_model.safetensors").write_bytes(random.Random(seed).randbytes(size))
    return LoRARequest("tune", 1, str(folder))


@pytest.mark.parametrize("size", SIZES)
def test_the_same_files_are_the_same_adapter_on_every_host(tmp_path: Path, size: int) -> None:
    here, there = adapter(tmp_path / "here", size), adapter(tmp_path / "there", size, base="/another/host/base")
    (tmp_path / "there" / "README.md").write_text("written there")
    assert request_hash(request(lora_request=here)) == request_hash(request(lora_request=there))


@pytest.mark.parametrize("what", ["weights", "configuration", "name"])
def test_another_adapter_is_another_one_though_it_has_the_same_size(tmp_path: Path, what: str) -> None:
    one = adapter(tmp_path / "one", SIZES[-1])
    other = adapter(
        tmp_path / "other", SIZES[-1], 2 if what == "weights" else 1, rank=16 if what == "configuration" else 8
    )
    if what == "name":
        other.lora_name = "another"
    hashes = {request_hash(request(lora_request=each)) for each in (one, other, None)}
    assert len(hashes) == 3


def test_weights_that_replace_others_in_one_place_are_seen(tmp_path: Path) -> None:
    one = adapter(tmp_path, 4096)
    before = adapter_identity(one)
    adapter(tmp_path, 4096, seed=2)
    os.utime(tmp_path / "adapter_model.safetensors", ns=(1, 1))
    assert adapter_identity(one) != before


def test_an_adapter_of_a_repository_is_known_by_its_names() -> None:
    def of(name: str, path: str) -> str | None:
        return adapter_identity(LoRARequest(name, 1, path))

    assert of("tune", "someone/tune") == of("tune", "someone/tune")
    assert len({of("tune", "someone/tune"), of("tune", "another/tune"), of("other", "someone/tune"), None}) == 4


def test_an_adapter_that_cannot_be_read_fails_no_step(tmp_path: Path) -> None:
    broken = adapter(tmp_path, 10)
    (tmp_path / "adapter_config.json").write_text("{")
    assert "tune" in str(adapter_identity(broken))
