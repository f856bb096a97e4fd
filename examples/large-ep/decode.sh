#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One of the two decode hosts: half of an engine of DP 32, TP 1. See README.md in this folder. Never run on NPUs.
set -euo pipefail
cd "$(dirname "$0")/../.."
set -a
# shellcheck source=examples/ascend.env
. examples/ascend.env
set +a
node=${1:-}
[[ $node =~ ^[01]$ ]] || {
  echo "usage: decode.sh NODE [flags of scripts/decode.sh], NODE 0 or 1" >&2
  exit 2
}
shift
read -ra hosts <<<"${DECODE_HOSTS:?the addresses of the two decode hosts}"
: "${SECRET_FILE:=/etc/vllm-ascend-pd/secret}" "${METASERVER_HOST:=${hosts[0]}}"
exec scripts/decode.sh --host "${hosts[node]}" --port 8002 --side-channel-port 18200 --secret-file "$SECRET_FILE" \
  --metaserver "http://$METASERVER_HOST:8000" --tp 1 --experts on --graph-mode FULL_DECODE_ONLY \
  --dp 32 --dp-size-local 16 --dp-start-rank $((node * 16)) --dp-address "${hosts[0]}" --dp-rpc-port 13345 "$@"
