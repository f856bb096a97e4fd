#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Is a deployment good? Waits until a pair has moved a block, then asks for a completion. usage: check.sh URL MODEL
set -euo pipefail
url=${1:?usage: check.sh http://HOST:PORT MODEL} model=${2:?usage: check.sh http://HOST:PORT MODEL}
for ((tries = 0; tries < ${CHECK_TRIES:-300}; tries++)); do
  if curl -sf -o /dev/null "$url/readiness"; then break; fi
  sleep 1
done
curl -sf "$url/readiness" >/dev/null || {
  echo "not ready: $(curl -s "$url/readiness")" >&2
  exit 1
}
curl -sf "$url/v1/completions" -H 'Content-Type: application/json' \
  -d "{\"model\": \"$model\", \"prompt\": \"Prefill here, decode there:\", \"max_tokens\": 16}"
echo
