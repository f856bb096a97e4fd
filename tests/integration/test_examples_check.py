# SPDX-License-Identifier: Apache-2.0
"""examples/check.sh against a real pair that is there already: the one that the tests of faults share."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import httpx
import pytest

from scripts.support.cells import Site

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
pytestmark = [pytest.mark.engines, pytest.mark.timeout(420)]


def check(url: str, model: str, tries: int = 60) -> subprocess.CompletedProcess[str]:
    """examples/check.sh, as an operator runs it."""
    environment = os.environ | {"CHECK_TRIES": str(tries), "no_proxy": "127.0.0.1"}
    return subprocess.run(
        [EXAMPLES / "check.sh", url, model], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def prefilled(url: str) -> float:
    """Prefills that D had done elsewhere, by the metaserver's own count."""
    page = httpx.get(url + "/metrics", trust_env=False).text
    name = 'ascend_pd_metaserver_reservations_total{end="prefilled"}'
    return next((float(line.split()[-1]) for line in page.splitlines() if line.startswith(name)), 0.0)


def test_check_sh_calls_a_pair_good_and_its_prompt_was_prefilled_elsewhere(faulty: Site) -> None:
    before = prefilled(faulty.front.url)
    done = check(faulty.front.url, "model")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["usage"]["completion_tokens"] >= 1 and answer["choices"][0]["finish_reason"] in ("length", "stop")
    assert prefilled(faulty.front.url) > before


def test_check_sh_fails_for_another_model_and_where_nobody_is(faulty: Site) -> None:
    assert check(faulty.front.url, "another-model").returncode != 0
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        done = check("http://{}:{}".format(*nobody.getsockname()), "model", tries=1)
    assert done.returncode == 1 and "not ready" in done.stderr
