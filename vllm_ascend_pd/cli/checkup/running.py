# SPDX-License-Identifier: Apache-2.0
"""Checks of a running engine, by the levels on its /metrics: what keeps it from working while /health is good."""

from __future__ import annotations

import http.client
import re
import urllib.request
from collections.abc import Iterator

from vllm_ascend_pd.cli.checkup.check import Check, failure, good
from vllm_ascend_pd.observe.tally import PREFIX

ANSWER_S = 5.0
MAX_BYTES = 64 << 20


def checks(url: str) -> Iterator[Check]:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url.rstrip("/") + "/metrics", timeout=ANSWER_S) as answer:
            text = answer.read(MAX_BYTES).decode(errors="replace")
    except (OSError, ValueError, http.client.HTTPException) as problem:  # urllib's own errors are OSErrors
        yield failure("engine", f"{url} does not answer: {problem}", "Give its API's address, http://host:port.")
        return
    seconds = sum(float(value) for value in re.findall(rf"^{PREFIX}revoking_seconds{{.*}} (\S+)$", text, re.MULTILINE))
    if not seconds:
        yield good("revocation", "no rank has access to revoke")
        return
    says = f"access to a rank's KV cache could not be revoked for {seconds:g} s: no P can push to that rank"
    remedy = (
        "Its log has the reason: often no descriptor or thread is free. It goes on by itself then; else restart it."
    )
    yield failure("revocation", says, remedy)
