# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests of what is around a connector, unchanged, with this package's connector in it.

* The handshake's: this connector in the place of the one that knows pipeline stages.
* MultiConnector's, with this connector under NIXL's name.
* The scheduler's that concern KV connectors, with this one as D in the place of their mock and of ExampleConnector.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from their_tests import CONNECTORS, PINS, SCHEDULERS, compare, extract, run

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.parametrize("release", PINS),
]


def test_the_handshake_reaches_this_connector_by_stage_and_rank(release: str, tmp_path: Path) -> None:
    files = [f"{CONNECTORS}/test_handshake_pp_aggregation.py"]
    extract(release, tmp_path, files)
    compare(run(release, tmp_path, "kv_producer", files), {}, 3)


HUB = "it wants a model of the hub"
STATS = ("isinstance", "it wants NIXL's class of statistics under NIXL's name")
WITHOUT_NIXL = {
    "test_multi_example_connector_consistency": ("Llama-3.2-1B", HUB),
    **dict.fromkeys(
        (
            "test_build_kv_connector_stats_reconstructs_nixl_stats",
            "test_build_kv_connector_stats_with_multiple_connectors",
            "test_build_kv_connector_stats_skips_connectors_without_custom_stats",
        ),
        STATS,
    ),
}


def test_multi_connector(release: str, tmp_path: Path) -> None:
    files = [f"{CONNECTORS}/test_multi_connector.py"]
    extract(release, tmp_path, files)
    outcome = run(release, tmp_path, "kv_consumer", files)
    compare(outcome, WITHOUT_NIXL, {"0.32.0": 25, "0.33.0": 27}[release])
    assert outcome.skipped == 1, "it wants a GPU"


OF_CONNECTORS = "(connector or kv or external or remote or recving) and not ec_connector"
WHOLE = "the mock finds a part of a prompt, within a step or later; this connector loads whole prompts, later"
MOCK = ("has no attribute 'requests'", "it reads the mock's own metadata")
ROLE = "the test names P's role, and this connector is D"
STATES = ("PD-CONF-005", "the test's Mamba-2 state is none that is known here")
HITS, SOURCES = "test_external_prefix_cache_metrics", "test_kv_connector_records_external_cache_hit_sources"
PREEMPTED = [
    f"{ec}-{v2}-{later}" for ec in ("False-None", "True-ec_consumer") for v2 in (False, True) for later in (False, True)
]
AS_THE_MOCK = {
    "test_throttle_prefills_defers_remote_kv_resume_with_local_prefill": ("'r2' not in", WHOLE),
    "test_prefix_cache_query_not_inflated_by_connector_defer": (
        "assert not",
        "the mock asks for delay before it answers",
    ),
    "test_kv_connector_honors_skip_reading_prefix_cache": ("KeyError", WHOLE),
    f"{SOURCES}[False]": ("64)", WHOLE),
    f"{SOURCES}[True]": ("64)", WHOLE),
    f"{HITS}[False-False]": ("assert 16 == (4 * 2)", WHOLE),
    f"{HITS}[False-True]": ("assert 16 == (4 * 2)", WHOLE),
    f"{HITS}[True-False]": ("assert 0", WHOLE),
    f"{HITS}[True-True]": MOCK,
    **{f"test_kv_connector_basic[{later}]": MOCK for later in (False, True)},
    **{f"test_kv_connector_unable_to_allocate[{ec}]": MOCK for ec in ("False-None", "True-ec_consumer")},
    **{f"test_kv_connector_handles_preemption[{case}]": MOCK for case in PREEMPTED},
    **{f"test_hybrid_per_group_hit_divergence_with_connector[{case}]": STATES for case in ("0-16", "16-32")},
    **{
        f"test_hybrid_fa_deeper_hit_respects_connector_lookup_policy[{case}]": STATES
        for case in ("True-0-5-16", "True-16-6-80", "False-16-6-32")
    },
    "test_requires_kv_delivery_defaults_to_producer_role": ("kv_producer", ROLE),
    "test_kv_pressure_preempt_mid_handoff[kv_producer-False]": ("assert False is True", ROLE),
}


# What a release has more of.
MORE: dict[str, tuple[int, dict[str, tuple[str, str]]]] = {
    "0.32.0": (32, {}),
    "0.33.0": (
        35,
        {
            **{
                f"test_prefix_hit_is_capped_at_retained_auxiliary_outputs[{case}]": ("assert 80 == (80 - 32)", WHOLE)
                for case in ("external", "external-sliding-window")
            },
            **{
                f"test_streaming_lookahead_hashes_follow_recomputed_kv[{how}]": ("Qwen3-Next-80B", HUB)
                for how in ("resident", "preempt", "reset")
            },
            "test_waiting_encoder_stall_kv_holder_keeps_drain_priority": ("llava-1.5-7b", HUB),
            **{
                f"test_cpu_encoder_input_updates_restore_after_kv_load_failure[{hit}]": ("llava-1.5-7b", HUB)
                for hit in (False, True)
            },
        },
    ),
}


def test_the_schedulers(release: str, tmp_path: Path) -> None:
    files = [f"{SCHEDULERS}/{name}.py" for name in ("test_scheduler", "test_async_scheduler")]
    extract(release, tmp_path, files)
    passes, more = MORE[release]
    compare(run(release, tmp_path, "kv_consumer", files, OF_CONNECTORS), AS_THE_MOCK | more, passes)
