# SPDX-License-Identifier: Apache-2.0
"""Flags of `vllm-ascend-pd plan --load`. The simulation needs what the router needs, and is imported when it runs."""

from __future__ import annotations

import argparse

from vllm_ascend_pd.cli.load import arrivals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "a load", "how many P for how many D: the router's own decisions over simulated engines"
    )
    add = group.add_argument
    add("--load", metavar="TRACE", help="JSON lines: timestamp in ms, input_length, output_length, hash_ids")
    add("--engines", type=int, default=4, metavar="N", help="P and D together (default: %(default)s)")
    for role, what in (("prefill", "tokens of prompts"), ("decode", "answers at once")):
        add(f"--{role}-line", metavar="MS,MS", help=f"a step's time: base, and for each of its {what}")
    add("--metrics", nargs="+", metavar="PAGE", help="the same from /metrics of a P and a D: files or URLs")
    add("--chunk", type=int, default=arrivals.CHUNK, help="tokens of a hash in the trace (default: %(default)s)")
    add("--at-once", type=int, default=256, help="--max-num-seqs of the engines (default: %(default)s)")
    add("--cache-tokens", type=int, default=500_000, help="of an engine's KV cache (default: %(default)s)")
    add("--pair-ms", type=float, default=30.0, help="that a pair adds to a request (default: %(default)s)")
    add("--good-ttft-ms", type=float, help="good answers begin within this (default: 5 times an idle engine's)")
    add("--good-tpot-ms", type=float, help="and have a token within this (default: 2 times an idle engine's)")
    add("--metaservers", type=int, default=1, help="which do not know each other's load (default: %(default)s)")
    add("--restart-s", type=float, default=60.0, help="until a lost engine is back (default: %(default)s)")
