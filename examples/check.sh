#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Is a deployment good? Waits until a pair has moved a block, then asks for a completion. usage: check.sh URL MODEL
# CHECK_KEY_FILE: a file with a client's key, where one is asked for.
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
authorization() { # on standard input: a command line is shown in the list of processes
  if [ -n "${CHECK_KEY_FILE:-}" ]; then printf 'Authorization: Bearer %s\n' "$(<"$CHECK_KEY_FILE")"; fi
}
authorization | curl -sf "$url/v1/completions" -H @- -H 'Content-Type: application/json' \
  -d "{\"model\": \"$model\", \"prompt\": \"Prefill here, decode there:\", \"max_tokens\": 16}"
echo
