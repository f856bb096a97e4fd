# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests, extracted unchanged from the pinned source distribution and run with this package's connector."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.support import newer, sdist
from tools.support.environments import beside
from tools.support.models import ROOT
from tools.support.routers import VLLM

PINS = {VLLM.version: VLLM, **newer.PINS}
CONNECTORS = "tests/v1/kv_connector/unit"
SCHEDULERS = "tests/v1/core"
PLUGIN = ROOT / "tests" / "integration" / "plugins" / "lifecycle"
OPT = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 50272, "hidden_size": 768}
OPT |= {"num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072, "max_position_embeddings": 2048}
OPT |= {"word_embed_proj_dim": 768, "torch_dtype": "float16"}
SECONDS = 900


@dataclass(frozen=True)
class RunOutcome:
    """Outcomes of a run: how many passed and were skipped, and the failures by name."""

    passed: int
    skipped: int
    failed: Mapping[str, str]
    output: str


def extract(release: str, where: Path, files: Sequence[str]) -> None:
    """Write these files, with what they import, and the configuration of the model that they name."""
    for folder in sorted({*(str(Path(file).parent) for file in files), CONNECTORS}):
        texts = sdist.read(sdist.ensure(PINS[release]), folder, ".py")
        wanted = {Path(file).name for file in files if str(Path(file).parent) == folder}
        (where / folder).mkdir(parents=True, exist_ok=True)
        for name in (*wanted, "utils.py"):
            (where / folder / name).write_text(texts[name])
        for parent in (
            Path(folder),
            *Path(folder).parents[:-1],
        ):  # packages up to `tests`: this project has a `unit` too
            (where / parent / "__init__.py").touch()
    model, commit = where / "hub" / "models--facebook--opt-125m", "0" * 40
    (model / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
    (model / "snapshots" / commit / "config.json").write_text(json.dumps(OPT))
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / "main").write_text(commit)


def run(
    release: str, where: Path, role: str, files: Sequence[str], chosen: str = "", variables: Mapping[str, str] = {}
) -> RunOutcome:
    """Run the chosen tests of these files with the connector in this role."""
    report = where / f"{role}.xml"
    report.unlink(missing_ok=True)
    paths = (ROOT, ROOT / "tests", PLUGIN)
    environment = {
        **os.environ,
        **{"PD_ROLE": role, "HF_HUB_CACHE": str(where / "hub"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        **variables,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    python = sys.executable if release == VLLM.version else beside(release)
    command = [python, "-m", "pytest", "-q", "--noconftest", "-p", "pd_in_nixls_place", "-k", chosen]
    command += ["--rootdir", str(where), f"--junitxml={report}", *files]
    done = subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert report.is_file(), done.stdout + done.stderr
    passed, skipped, failed = 0, 0, {}
    for case in ET.parse(report).iter("testcase"):
        end = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        passed += end is None
        skipped += end is not None and end.tag == "skipped"
        if end is not None and end.tag != "skipped":
            failed[case.get("name", "")] = f"{end.get('message')}\n{end.text}"
    return RunOutcome(passed, skipped, failed, done.stdout)


def compare(outcome: RunOutcome, cannot: Mapping[str, tuple[str, str]], passes: int) -> None:
    """Check that what failed is what cannot pass, each with the words of its reason, and that the rest has passed.

    `cannot`: by the test's name a part of its failure, and the reason.
    """
    assert outcome.failed.keys() == cannot.keys(), outcome.output
    for name, (words, _) in cannot.items():
        assert words in outcome.failed[name], outcome.failed[name]
    assert outcome.passed == passes, outcome.output
