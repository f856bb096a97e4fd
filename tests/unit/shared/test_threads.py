# SPDX-License-Identifier: Apache-2.0
"""Work for which the system refuses a thread: it is done all the same, and the log has nothing of what was given."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from unit.kits.refusing import no_more_threads
from vllm_ascend_pd.shared.threads import aside


async def test_what_work_was_given_is_not_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """It may be a client's prompt or key, and long: to write it down held the loop up for seconds."""
    with no_more_threads("refused"), ThreadPoolExecutor(1, thread_name_prefix="refused") as executor:
        assert await aside(partial(sorted, key=len), ["a prompt", "a key"], executor=executor) == ["a key", "a prompt"]
    assert "no thread for sorted (" in caplog.text and "a key" not in caplog.text and "len" not in caplog.text
