# SPDX-License-Identifier: Apache-2.0
"""The 26 defects of the layerwise connector that this package follows, each with the tests that would fail on it.

The list is ours, made by reading it and by running its classes. A defect that cannot occur here by construction says
why. The tests below only check that every test named here exists.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Defect:
    """A defect of the predecessor, the tests that cover it here, and the construction that rules it out, if any."""

    what: str
    tests: tuple[str, ...]
    by_construction: str = ""


UNIT, INTEGRATION = "tests/unit", "tests/integration"

DEFECTS: dict[int, Defect] = {
    # -- wrong answers
    1: Defect(
        "P frees blocks that the send queue still reads",
        (
            f"{UNIT}/prefill/test_decisions_push.py::test_blocks_are_held_until_the_workers_report_once",
            f"{UNIT}/runtime/test_runtime_faults.py::test_blocks_of_a_write_that_failed_are_released_only_when_it_is_quiet",
            f"{UNIT}/runtime/test_runtime_preemption.py::test_writes_that_do_not_return_before_preemption_fail_the_push_first",
            f"{INTEGRATION}/test_gqa.py::TestFromTp2::test_a_client_that_leaves_gives_all_blocks_back",
        ),
    ),
    2: Defect(
        "DONE that comes before D has bound the step is dropped, and the request hangs",
        (
            f"{UNIT}/runtime/test_runtime_faults.py::test_a_step_that_binds_late_loses_nothing",
            f"{UNIT}/protocol/test_protocol_reservation.py::"
            "test_a_begin_before_the_bind_waits_and_is_answered_when_the_gate_opens",
        ),
        "DONE needs READY, and READY is given only after the bind, so it cannot be early.",
    ),
    3: Defect(
        "a chunk that fails on one rank while another sends the last one ends as success",
        (
            f"{UNIT}/runtime/test_runtime_aggregator.py::test_a_failure_on_one_of_four_workers_of_prefill_fails_the_request",
            f"{UNIT}/protocol/test_protocol_reservation.py::"
            "test_one_failed_contributor_fails_the_transfer_and_the_others_are_fenced",
            f"{INTEGRATION}/test_aggregator.py::test_a_failure_on_one_of_four_workers_fails_the_request_on_all",
        ),
    ),
    4: Defect(
        "a preempted and resumed prefill in several chunks sends the wrong blocks",
        (
            f"{UNIT}/prefill/test_decisions_push.py::test_a_preempted_request_starts_over_with_its_new_blocks",
            f"{UNIT}/prefill/test_decisions_push.py::AnySequence::compute",
            f"{UNIT}/runtime/test_runtime_preemption.py::test_a_preempted_request_starts_over_on_other_blocks",
            f"{UNIT}/runtime/test_runtime_preemption.py::"
            "test_a_request_preempted_after_some_ranks_have_finished_with_it_is_not_half_pushed",
            f"{INTEGRATION}/test_gqa.py::TestFromTp2::test_preemption_on_prefill_starts_the_push_over",
        ),
    ),
    5: Defect(
        "DONE of one attempt completes the next; late writes of an attempt are not fenced",
        (
            f"{UNIT}/protocol/test_protocol_reservation.py::test_done_of_another_writer_does_not_count",
            f"{UNIT}/protocol/test_protocol_reservation.py::test_the_first_push_binds_and_another_is_refused",
            f"{UNIT}/runtime/test_runtime_faults.py::"
            "test_blocks_are_used_again_after_a_cancel_without_a_trace_of_the_old_request",
            f"{UNIT}/runtime/test_runtime_isolation.py::"
            "test_a_writer_that_stands_still_inside_a_write_is_shut_out_and_writes_nothing_when_it_wakes",
            f"{UNIT}/runtime/test_runtime_random.py::test_everything_ends_and_what_ends_well_is_right",
        ),
    ),
    6: Defect(
        "different layouts on P and D are written silently when the sizes are not configured",
        (
            f"{UNIT}/schedulers/test_decisions_scheduler.py::"
            "test_a_cache_that_does_not_fit_is_named_with_both_values_before_anything_is_pushed",
            f"{UNIT}/protocol/test_protocol_reservation.py::test_a_difference_is_refused_field_by_field_with_both_values",
            f"{UNIT}/geometry/test_geometry_match.py::test_each_difference_is_named_with_both_values",
        ),
        "Sizes are not configured: each side tells its own, and both are compared.",
    ),
    7: Defect(
        "block ids are rescaled in place, twice",
        (
            f"{UNIT}/runtime/test_runtime.py::test_blocks_may_be_smaller_on_decode_where_tokens_lie_apart",
            f"{UNIT}/runtime/test_runtime.py::test_chunks_that_end_inside_blocks_leave_no_gap",
            f"{UNIT}/geometry/test_geometry_plan.py::test_layouts_and_block_sizes_may_differ",
        ),
        "Block ids are never rescaled: plans are made in tokens, and both sides' tables are only read.",
    ),
    8: Defect(
        "V is taken to be as wide as K",
        (
            f"{UNIT}/device/test_caches.py::test_latent_and_rope_apart_have_cells_of_their_own",
            f"{UNIT}/runtime/test_runtime.py::test_every_byte_arrives_and_no_other_is_touched",
        ),
    ),
    # -- hangs and deaths
    9: Defect(
        "a metaserver that is down or says 4xx or 5xx is taken for success, and D waits for ever",
        (
            f"{UNIT}/decode/test_metaserver_client.py::test_a_metaserver_that_is_not_there_fails_within_the_deadline",
            f"{UNIT}/decode/test_metaserver_client.py::test_what_may_have_been_executed_is_not_posted_again",
            f"{UNIT}/schedulers/test_decisions_scheduler.py::test_a_metaserver_that_is_down_cancels_the_load",
            f"{INTEGRATION}/test_gqa.py::TestFromTp1::test_a_failed_load_is_recomputed_or_fails_as_configured",
        ),
    ),
    10: Defect(
        "D does not learn that P died or aborted; a late DONE frees blocks of a request that D aborted",
        (
            f"{UNIT}/runtime/test_runtime_faults.py::test_an_abort_on_prefill_fails_the_load_at_once_and_releases_the_blocks",
            f"{UNIT}/runtime/test_runtime_faults.py::test_a_cancel_on_decode_stops_the_push_and_fences_the_blocks",
            f"{UNIT}/router/test_metaserver_service.py::test_d_is_notified_at_once_when_p_fails_and_computes_by_itself",
            f"{UNIT}/channel/test_channel_fence.py::test_a_killed_process_is_gone_exactly_once",
            f"{UNIT}/protocol/test_protocol_reservation.py::test_a_lapsed_lease_fails_the_transfer_and_names_the_contributor",
        ),
    ),
    11: Defect(
        "a failed load is not reported as finished: blocks leak or the request never resumes",
        (
            f"{UNIT}/test_connector.py::test_a_failed_load_is_named_by_request",
            f"{UNIT}/test_connector.py::test_a_failed_load_is_named_by_blocks_for_an_older_vllm",
            f"{INTEGRATION}/test_gqa.py::TestFromTp1::test_a_failed_load_is_recomputed_or_fails_as_configured",
        ),
    ),
    12: Defect(
        "a dead D blocks P's forward thread, and then the transfers of every other D",
        (
            f"{UNIT}/runtime/test_runtime_isolation.py::"
            "test_a_decode_engine_that_accepts_and_stays_silent_delays_neither_the_forward_nor_others",
            f"{UNIT}/runtime/test_runtime_isolation.py::test_a_destination_whose_writes_stall_delays_no_other",
            f"{UNIT}/test_connector.py::test_the_hooks_of_a_layer_do_no_more_than_note_it",
            f"{UNIT}/transport/test_mooncake_faults.py::test_a_silent_peer_delays_no_other",
        ),
    ),
    13: Defect(
        "nothing to load still posts empty block lists, and missing parameters kill P's scheduler",
        (
            f"{UNIT}/decode/test_decisions_load.py::test_asking_is_free_and_one_token_is_not_worth_it",
            f"{UNIT}/schedulers/test_decisions_scheduler.py::test_a_forged_reservation_is_a_plain_prefill_that_says_why",
            f"{UNIT}/schedulers/test_decisions_scheduler.py::test_other_parameters_are_a_plain_prefill",
            f"{UNIT}/prefill/test_decisions_push.py::test_a_reservation_that_does_not_fit_is_refused_and_leaves_nothing",
        ),
    ),
    14: Defect(
        "later pipeline stages crash, a D of several hosts is impossible, n > 1 hangs",
        (
            f"{UNIT}/test_connector.py::test_stages_and_ranks_tell_their_layers_by_pp_and_tp",
            f"{UNIT}/runtime/test_runtime.py::test_every_byte_arrives_and_no_other_is_touched",
            f"{UNIT}/schedulers/test_decisions_scheduler.py::test_children_of_one_request_share_parameters_that_do_not_change",
            f"{UNIT}/router/test_metaserver_service.py::test_n_choices_bring_n_transfers_on_one_ticket",
            f"{INTEGRATION}/test_gqa.py::TestFromPipeline::test_every_length_to_tp_1",
        ),
        "A reservation names the address of each D worker, wherever it runs; request ids never leave their engine.",
    ),
    15: Defect(
        "32 threads, each blocked for a whole prefill",
        (f"{UNIT}/schedulers/test_decisions_scheduler.py::test_hundreds_of_loads_in_flight_take_no_thread_each",),
    ),
    16: Defect(
        "an HTTP client without timeouts and bounds, three immediate retries, no look at the status",
        (
            f"{UNIT}/decode/test_metaserver_client.py::test_silence_of_three_heartbeats_fails",
            f"{UNIT}/decode/test_metaserver_client.py::test_the_deadline_ends_a_call_that_beats_for_ever",
            f"{UNIT}/decode/test_metaserver_client.py::test_more_than_connections_and_queue_fails_at_once",
            f"{UNIT}/decode/test_metaserver_client.py::test_what_was_refused_is_posted_again",
            f"{UNIT}/shared/test_backoff.py::test_backoff_grows_and_is_bounded",
        ),
    ),
    17: Defect(
        "an exception kills the send thread silently; waits without limit; no shutdown",
        (
            f"{UNIT}/runtime/test_runtime_faults.py::"
            "test_a_dead_writer_fails_every_push_and_releases_the_blocks_when_they_are_quiet",
            f"{UNIT}/runtime/test_runtime_faults.py::test_a_push_ends_at_the_deadline_of_its_reservation",
            f"{UNIT}/runtime/test_runtime_faults.py::test_a_prefill_that_never_comes_costs_decode_its_deadline",
            f"{UNIT}/runtime/test_runtime_faults.py::test_closing_with_transfers_in_flight_joins_threads_and_frees_ports",
        ),
    ),
    18: Defect(
        "context parallelism with a prefix hit on D computes the wrong number of senders and hangs",
        (f"{UNIT}/admission/test_admission.py::test_what_is_not_proven_stops_the_start_with_a_sentence",),
        "Context parallelism does not start with this connector.",
    ),
    # -- cost
    19: Defect(
        "planning starts from block 0 in every step; whole block lists are pickled, requests are copied deeply",
        (
            f"{UNIT}/prefill/test_decisions_push.py::test_each_step_tells_new_blocks_and_a_token_range_only",
            f"{UNIT}/decode/test_decisions_load.py::test_each_step_tells_what_is_new_only",
            f"{UNIT}/geometry/test_geometry_push_range.py::test_steps_meet_without_gap_or_overlap",
        ),
        "A step plans the tokens that it computes; scripts/bench_planning.sh shows that the time does not grow.",
    ),
    20: Defect(
        "a new socket for each DONE, in the only send thread",
        (f"{UNIT}/channel/test_channel.py::test_one_connection_per_endpoint_is_made_and_reused",),
        "The thread that writes owns no socket: messages leave on the loop thread.",
    ),
    21: Defect(
        "staging of whole layers, and a queue of copies without a bound",
        (
            f"{UNIT}/regroup/test_regroup_staging.py::test_sizes_are_fixed_and_logged_at_start",
            f"{UNIT}/regroup/test_regroup_failures.py::test_a_stalled_destination_stops_no_other",
        ),
        "What is pushed directly is read from the paged cache and never copied; what waits is a reference to a step.",
    ),
    22: Defect(
        "full graphs on P leave the layer hooks out, silently",
        (
            f"{UNIT}/test_connector.py::test_full_graphs_would_skip_the_hooks_so_p_gets_piecewise_ones_and_d_keeps_its_own",
            f"{UNIT}/runtime/test_runtime.py::test_what_no_hook_said_was_computed_is_not_pushed",
        ),
    ),
    # -- access
    23: Defect(
        "any caller gets device addresses, and forged DONE messages are accepted",
        (
            f"{UNIT}/channel/test_channel_hostile.py::test_a_wrong_secret_gets_nothing_but_a_refusal",
            f"{UNIT}/channel/test_channel_hostile.py::test_a_recorded_conversation_is_worth_nothing",
            f"{UNIT}/runtime/test_runtime_isolation.py::test_engines_with_different_secrets_never_meet",
            f"{UNIT}/admission/test_admission.py::test_an_address_that_others_reach_needs_a_secret",
            f"{UNIT}/protocol/test_protocol_reservation.py::test_done_before_any_authority_is_acknowledged_and_does_not_count",
        ),
    ),
    24: Defect(
        "metaserver, host, port and blocks come from the client's request",
        (
            f"{UNIT}/decode/test_decisions_load.py::test_a_forged_ticket_is_prefilled_locally_with_the_reason",
            f"{UNIT}/schedulers/test_decisions_scheduler.py::test_forged_tickets_are_prefilled_locally_and_call_no_address",
            f"{UNIT}/schedulers/test_decisions_scheduler.py::test_a_signed_reservation_is_taken_with_the_right_secret_only",
            f"{UNIT}/decode/test_metaserver_client.py::test_only_the_allow_list_is_called",
            f"{UNIT}/router/test_metaserver_bodies.py::test_a_clients_transfer_parameters_never_get_through",
            f"{UNIT}/runtime/test_runtime_isolation.py::test_blocks_that_decode_does_not_have_are_never_written",
        ),
    ),
    25: Defect(
        "certificates are not verified by default; the proxy knows only http and sends `Bearer None`",
        (
            f"{UNIT}/test_config.py::test_what_is_unsafe_is_off_until_it_is_asked_for",
            f"{UNIT}/router/test_metaserver_processes.py::test_tls_works_both_ways",
            f"{UNIT}/router/test_metaserver_keys.py::test_the_key_is_lent_to_clients_that_bring_one_of_theirs",
        ),
    ),
    # -- its proxy
    26: Defect(
        "200 with an empty body when D fails, no failover, aborts that do not reach P, a retry that hangs",
        (
            f"{UNIT}/router/test_metaserver_service.py::test_an_empty_200_is_no_answer",
            f"{UNIT}/router/test_metaserver_failures.py::"
            "test_a_stream_that_fails_before_its_first_token_is_an_error_not_a_200",
            f"{UNIT}/router/test_metaserver_failures.py::test_one_of_two_ps_killed_under_load_loses_no_request_and_comes_back",
            f"{UNIT}/router/test_metaserver_service.py::test_a_client_that_leaves_cancels_both_legs",
            f"{UNIT}/router/test_metaserver_service.py::test_a_failed_prefill_is_repeated_on_another_p_under_a_new_ticket",
        ),
    ),
}


@lru_cache(maxsize=64)
def defined(file: str) -> frozenset[str]:
    """Return names of the functions of a file, methods as Class::name."""
    tree = ast.parse((ROOT / file).read_text())
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            inner = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            names.update(f"{node.name}::{each.name}" for each in inner)
    return frozenset(names)


@pytest.mark.parametrize("number", DEFECTS, ids=lambda number: f"{number}")
def test_every_defect_has_tests_that_exist(number: int) -> None:
    defect = DEFECTS[number]
    assert defect.what and (defect.tests or len(defect.by_construction) > 20)
    for node in defect.tests:
        file, _, name = node.partition("::")
        assert (ROOT / file).is_file(), f"{file} does not exist"
        assert name in defined(file), f"{node} does not exist"


def test_none_of_the_26_is_left_out() -> None:
    assert list(DEFECTS) == list(range(1, 27))
    assert all(len(set(defect.tests)) == len(defect.tests) for defect in DEFECTS.values())


def test_a_name_that_does_not_exist_is_noticed() -> None:
    assert "test_nothing_of_the_kind" not in defined("tests/unit/test_predecessor.py")
    assert "test_a_name_that_does_not_exist_is_noticed" in defined("tests/unit/test_predecessor.py")
