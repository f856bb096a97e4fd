# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests of a connector's life cycle, unchanged, with this package's connector instead of NIXL's.

They are extracted from the pinned source distribution at run time. vLLM's other connector tests (failed loads, invalid
blocks, errors, the aggregator) replace the connector by a mock, so they test none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tools.support import newer, sdist
from tools.support.environments import beside
from tools.support.models import ROOT
from tools.support.routers import VLLM

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]
PINS = {VLLM.version: VLLM, **newer.PINS}
FOLDER = "tests/v1/kv_connector/unit"
PREFILL, DECODE = "test_remote_prefill_lifecycle", "test_remote_decode_lifecycle"
PULLS = "it wants block ids in P's answer, which are for a D that pulls"
# Tests that cannot pass, with a part of the failure and the reason.
CANNOT = {
    ("kv_producer", "test_short_prompt_lifecycle"): ("remote_block_ids", PULLS),
    ("kv_producer", "test_prefix_cache_lifecycle"): ("remote_block_ids", PULLS),
    ("kv_producer", "test_p_side_chunked_prefill_mamba"): (
        "assert 64 == (64 - 1)",
        "states are not held for a D that comes later (PD-META-031), so P's prompt is not cut for one",
    ),
    **{
        ("kv_consumer", f"test_async_load_does_not_double_reserve_mamba_spec_blocks[{case}]"): (
            "PD-CONF-005",
            "Mamba-2 states with drafts are refused",
        )
        for case in ("none-128-18", "align-16-18")
    },
}
# For each role the files, and the selection of its tests.
ROLES = {"kv_consumer": (PREFILL, "not p_side"), "kv_producer": (f"{DECODE} {PREFILL}", f"{DECODE} or p_side")}
OPT = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 50272, "hidden_size": 768}
OPT |= {"num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072, "max_position_embeddings": 2048}
OPT |= {"word_embed_proj_dim": 768, "torch_dtype": "float16"}


@pytest.fixture(scope="module", params=PINS)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def theirs(release: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's test files, and the configuration of the model that they name."""
    where = tmp_path_factory.mktemp("vllm")
    found = sdist.read(sdist.ensure(PINS[release]), FOLDER, ".py")
    for name in (f"{PREFILL}.py", f"{DECODE}.py", "utils.py", "__init__.py"):
        (where / FOLDER).mkdir(parents=True, exist_ok=True)
        (where / FOLDER / name).write_text(found[name])
    model, commit = where / "hub" / "models--facebook--opt-125m", "0" * 40
    (model / "snapshots" / commit).mkdir(parents=True)
    (model / "snapshots" / commit / "config.json").write_text(json.dumps(OPT))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    return where


@pytest.mark.parametrize(("role", "passes"), [("kv_consumer", 13), ("kv_producer", 2)])
def test_what_passes_and_what_cannot(release: str, theirs: Path, role: str, passes: int) -> None:
    files, of_role = ROLES[role]
    report = theirs / f"{role}.xml"
    paths = (ROOT, ROOT / "tests", ROOT / "tests" / "integration" / "plugins" / "lifecycle")
    environment = {
        **os.environ,
        **{"PD_ROLE": role, "HF_HUB_CACHE": str(theirs / "hub"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    python = sys.executable if release == VLLM.version else beside(release)
    command = [python, "-m", "pytest", "-q", "--noconftest", "-p", "pd_in_nixls_place", "-k", of_role]
    command += ["--rootdir", str(theirs), f"--junitxml={report}", *(f"{FOLDER}/{name}.py" for name in files.split())]
    done = subprocess.run(
        command, cwd=theirs, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert report.is_file(), done.stdout + done.stderr
    wrong, good = {}, 0
    for case in ET.parse(report).iter("testcase"):
        problem = next((child for child in case if child.tag in ("failure", "error")), None)
        good += problem is None
        if problem is not None:
            wrong[role, case.get("name", "")] = f"{problem.get('message')}\n{problem.text}"
    expected = {key: words for key, (words, _) in CANNOT.items() if key[0] == role}
    assert wrong.keys() == expected.keys(), done.stdout
    for key, words in expected.items():
        assert words in wrong[key], wrong[key]
    assert good == passes
