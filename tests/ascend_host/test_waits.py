# SPDX-License-Identifier: Apache-2.0
"""P's waits for the model's stream, removed one by one (plugin/ascend_host/faults.py).

Each time the tokens are wrong, or `verify: full` detects the bytes. With all waits the same engines are right
(test_pairs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_sets import Engines, Machine, Side
from host_build import HostBuild
from pairs import Pair, fresh_prompt

from tools.support.checks import fresh_salt
from tools.support.client import RequestFailed, body_of, post
from tools.support.cluster import Cluster, fresh_directory

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1800)]

LENGTH = 300
REGROUPED = {"regroup": "always"}
LATE = 200_000
OF_BYTES = ("PD-WIRE-004", "did not give their part")  # a checksum, a tag of an exchange
EQUAL = 1e-4  # between two log-probabilities

WITHOUT = {
    "computed": Engines("without computed", p=Side(late_us=LATE, forgets="computed"), verify="off"),
    "computed, verified": Engines("without computed, verified", p=Side(late_us=LATE, forgets="computed")),
    "hold": Engines("without hold", p=Side(2, keys=REGROUPED, late_us=LATE, forgets="hold"), verify="off"),
}


@pytest.fixture
def cluster(told: Callable[[str], None]) -> Iterator[Cluster]:
    with Cluster(fresh_directory("ascend_host"), progress=told) as cluster:
        yield cluster
    assert not cluster.leaks, cluster.leaks


def said(url: str, prompt: list[int], **more: Any) -> tuple[list[int], list[float]]:
    """Return tokens and their log-probabilities, which change with any byte of the cache."""
    choice = post(url, body_of(prompt, 12, logprobs=1, **more))["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def checked_bytes(pair: Pair) -> list[str]:
    """Return the log lines about bytes that failed their checks."""
    return [line for line in pair.failed_transfers() if any(code in line for code in OF_BYTES)]


def wrong(engines: Engines, build: HostBuild, cluster: Cluster) -> list[str]:
    """Return what was wrong with three prompts one after the other.

    Each ends at its second token, which is not known before.
    """
    pair = engines.start(Machine.host(build), cluster)
    prompts = [fresh_prompt(LENGTH) for _ in range(3)]
    expected = [said(pair.prefill.url, prompt, cache_salt=fresh_salt("reference")) for prompt in prompts]
    found = []
    for prompt, (tokens, chances) in zip(prompts, expected, strict=True):
        try:
            got, sure = said(pair.front.url, prompt, stop_token_ids=[tokens[1]])
        except RequestFailed as failed:
            if not (told := checked_bytes(pair)):
                raise  # an unrelated error shows nothing
            found.append(f"{failed}; {told}")
            continue
        if got != tokens[: len(got)]:
            found.append(f"expected {tokens}, got {got}")
        elif any(abs(a - b) > EQUAL for a, b in zip(chances, sure, strict=False)):
            found.append(f"expected {chances}, got {sure}")
    return found + checked_bytes(pair)


@pytest.mark.parametrize("name", WITHOUT)
def test_a_wait_that_is_left_out_is_seen(
    name: str, build: HostBuild, cluster: Cluster, told: Callable[[str], None]
) -> None:
    found = wrong(WITHOUT[name], build, cluster)
    assert found
    told(f"without {name}: {found[0]}")
