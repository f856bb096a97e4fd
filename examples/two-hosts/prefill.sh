#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The prefill host of two. See README.md in this folder. Ran on CPU; on NPUs never.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=examples/environment.sh
. examples/environment.sh
: "${PREFILL_HOST:?the address of this host}" "${SECRET_FILE:=/etc/vllm-ascend-pd/secret}"
as_addresses PREFILL_HOST
on_several_hosts "$PREFILL_HOST"
exec scripts/prefill.sh --host "$PREFILL_HOST" --port 8001 --secret-file "$SECRET_FILE" "$@"
