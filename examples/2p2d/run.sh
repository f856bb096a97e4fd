#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Two prefill and two decode engines and a metaserver on one host, until ctrl-C. Ran on CPU; on NPUs never.
#   examples/2p2d/run.sh --model DIR [more flags of scripts/prefill.sh and scripts/decode.sh]
#   then: examples/check.sh http://127.0.0.1:8000 DIR
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=examples/environment.sh
. examples/environment.sh

dry=
for word in "$@"; do if [ "$word" = --dry-run ]; then dry=1; fi; done
pids=()
start() {
  if [ -n "$dry" ]; then
    "$@"
  else
    setsid "$@" &
    pids+=($!)
  fi
}
stop() {
  local again=
  trap 'again=1' INT TERM # a second signal ends the waiting, not the stop
  kill -TERM "${pids[@]}" 2>/dev/null || true
  for _ in $(seq 300); do # 30 s: vLLM does not hear a SIGTERM that comes while its engine starts
    if [ -n "$again" ] || ! kill -0 "${pids[@]}" 2>/dev/null; then break; fi
    sleep 0.1 || true
  done
  trap '' INT TERM
  for pid in "${pids[@]}"; do kill -KILL -- "-$pid" 2>/dev/null || true; done
  wait
}
trap stop EXIT
trap 'exit 130' INT TERM

start scripts/metaserver.sh ${dry:+--dry-run} --prefill http://127.0.0.1:8001 --prefill http://127.0.0.1:8003 \
  --decode http://127.0.0.1:8002 --decode http://127.0.0.1:8004
start scripts/prefill.sh --port 8001 --devices 0 "$@"
start scripts/decode.sh --port 8002 --devices 1 "$@"
start scripts/prefill.sh --port 8003 --devices 2 "$@"
start scripts/decode.sh --port 8004 --devices 3 "$@"
if [ -z "$dry" ]; then wait -n; fi # one that ends by itself ends all
