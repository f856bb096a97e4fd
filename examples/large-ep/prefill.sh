#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One of the prefill hosts: an engine of its own, DP 2, TP 8. See README.md in this folder. Never run on NPUs.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=examples/environment.sh
. examples/environment.sh
: "${PREFILL_HOSTS:?the prefill hosts}"
as_addresses PREFILL_HOSTS
read -ra hosts <<<"$PREFILL_HOSTS"
node=${1:-}
[[ $node =~ ^[0-9]{1,3}$ && $node -lt ${#hosts[@]} ]] || {
  echo "usage: prefill.sh NODE [flags of scripts/prefill.sh], NODE 0 to $((${#hosts[@]} - 1)): its place in PREFILL_HOSTS" >&2
  exit 2
}
shift
: "${SECRET_FILE:=/etc/vllm-ascend-pd/secret}"
on_several_hosts "${hosts[node]}"
exec scripts/prefill.sh --host "${hosts[node]}" --port 8001 --secret-file "$SECRET_FILE" --tp 8 --experts on --eager on \
  --dp 2 "$@"
