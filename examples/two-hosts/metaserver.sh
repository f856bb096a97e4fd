#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The metaserver for two hosts; it runs on the decode host or anywhere else. See README.md in this folder.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=examples/environment.sh
. examples/environment.sh
: "${PREFILL_HOST:?the prefill host}" "${DECODE_HOST:?the decode host}" "${METASERVER_HOST:=$DECODE_HOST}"
as_addresses PREFILL_HOST DECODE_HOST METASERVER_HOST
exec scripts/metaserver.sh --host "$METASERVER_HOST" --port 8000 --prefill "http://$PREFILL_HOST:8001" \
  --decode "http://$DECODE_HOST:8002" "$@"
