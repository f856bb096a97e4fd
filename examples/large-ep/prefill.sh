#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One of the four prefill hosts: half of an engine of DP 4, TP 8. See README.md in this folder. Never run on NPUs.
set -euo pipefail
cd "$(dirname "$0")/../.."
set -a
# shellcheck source=examples/ascend.env
. examples/ascend.env
set +a
node=${1:-}
[[ $node =~ ^[0-3]$ ]] || {
  echo "usage: prefill.sh NODE [flags of scripts/prefill.sh], NODE 0 to 3" >&2
  exit 2
}
shift
read -ra hosts <<<"${PREFILL_HOSTS:?the addresses of the four prefill hosts}"
: "${SECRET_FILE:=/etc/vllm-ascend-pd/secret}"
exec scripts/prefill.sh --host "${hosts[node]}" --port 8001 --secret-file "$SECRET_FILE" --tp 8 --experts on --eager on \
  --dp 4 --dp-size-local 2 --dp-start-rank $((node % 2 * 2)) --dp-address "${hosts[node / 2 * 2]}" --dp-rpc-port 13345 "$@"
