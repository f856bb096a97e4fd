#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The decode host of two. See README.md in this folder. Ran on CPU; on NPUs never.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=examples/environment.sh
. examples/environment.sh
: "${DECODE_HOST:?the address of this host}" "${SECRET_FILE:=/etc/vllm-ascend-pd/secret}" "${METASERVER_HOST:=$DECODE_HOST}"
as_addresses DECODE_HOST METASERVER_HOST
on_several_hosts "$DECODE_HOST"
exec scripts/decode.sh --host "$DECODE_HOST" --port 8002 --side-channel-port 18200 --secret-file "$SECRET_FILE" --metaserver "http://$METASERVER_HOST:8000" "$@"
