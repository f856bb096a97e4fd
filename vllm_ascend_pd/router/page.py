# SPDX-License-Identifier: Apache-2.0
"""The status page at `/`: one HTML file that asks `/status` every second. It holds no data and loads nothing else.

With an admin token the page is open to all; it asks for the token and sends it with each of its own requests. Without
one it is for this host only, like the rest of the admin API. A page of another origin cannot misuse it: the browser
never sends the token by itself, and the policy below lets only this script run.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from vllm_ascend_pd.shared.http_session import Headers
from vllm_ascend_pd.viewer.timeline import Trace, picture, skipped

PAGE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
_MAX_TRACE_BYTES = 256 << 20


def _hash(tag: str) -> str:
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"


_POLICY = (
    f"default-src 'none'; script-src {_hash('script')}; style-src {_hash('style')}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Headers = [
    (b"content-security-policy", _POLICY.encode()),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


def timeline(directory: str, transfer: str) -> dict[str, Any]:
    """Return a transfer's timeline by the trace files in `directory`, or why there is none. Not for the event loop."""
    if not directory:
        return {"why": "The metaserver was started without --trace-dir, so it has no engine's trace."}
    size = sum(path.stat().st_size for path in Path(directory).rglob("*.jsonl"))
    if size > _MAX_TRACE_BYTES:
        return {
            "why": f"{directory} holds {size >> 20} MiB: use vllm-ascend-pd trace {directory} --transfer {transfer}"
        }
    trace = Trace(Path(directory))
    if transfer not in trace.transfers():
        return {
            "why": f"No decode engine wrote of this transfer into {directory} (trace_dir of the engines, same host)."
        }
    return {"picture": "\n".join([*picture(trace.timeline_of(transfer)), *skipped(trace)])}
