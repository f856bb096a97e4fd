#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One of the decode hosts: a part of one engine, TP 1, a rank on each NPU. See README.md in this folder. Never run on NPUs.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${HCCL_BUFFSIZE:=1100}" # experts over all ranks need more than P's: 600 to 1,100 in vllm-ascend's own configurations
export HCCL_BUFFSIZE
# shellcheck source=examples/environment.sh
. examples/environment.sh
: "${DECODE_HOSTS:?the decode hosts}"
as_addresses DECODE_HOSTS
read -ra hosts <<<"$DECODE_HOSTS"
node=${1:-}
[[ $node =~ ^[0-9]{1,3}$ && $node -lt ${#hosts[@]} ]] || {
  echo "usage: decode.sh NODE [flags of scripts/decode.sh], NODE 0 to $((${#hosts[@]} - 1)): its place in DECODE_HOSTS" >&2
  exit 2
}
shift
: "${SECRET_FILE:=/etc/vllm-ascend-pd/secret}" "${METASERVER_HOST:=${hosts[0]}}" "${NPUS:=16}" # NPUs of a host
as_addresses METASERVER_HOST
on_several_hosts "${hosts[node]}"
exec scripts/decode.sh --host "${hosts[node]}" --port 8002 --side-channel-port 18200 --secret-file "$SECRET_FILE" \
  --metaserver "http://$METASERVER_HOST:8000" --tp 1 --experts on --graph-mode FULL_DECODE_ONLY \
  --dp "$((${#hosts[@]} * NPUS))" --dp-size-local "$NPUS" --dp-start-rank "$((node * NPUS))" --dp-address "${hosts[0]}" \
  --dp-rpc-port 13345 "$@"
