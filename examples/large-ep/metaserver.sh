#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The metaserver of these hosts, on the first decode host or anywhere else. See README.md in this folder.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=examples/environment.sh
. examples/environment.sh
: "${PREFILL_HOSTS:?the prefill hosts}" "${DECODE_HOSTS:?the decode hosts}" "${METASERVER_HOST:=${DECODE_HOSTS%% *}}"
as_addresses PREFILL_HOSTS DECODE_HOSTS METASERVER_HOST
read -ra prefill <<<"$PREFILL_HOSTS"
read -ra decode <<<"$DECODE_HOSTS"
engines=()
for host in "${prefill[@]}"; do engines+=(--prefill "http://$host:8001"); done
for host in "${decode[@]}"; do engines+=(--decode "http://$host:8002"); done
exec scripts/metaserver.sh --host "$METASERVER_HOST" --port 8000 "${engines[@]}" "$@"
