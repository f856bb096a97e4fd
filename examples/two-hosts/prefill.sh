#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The prefill host of two. See README.md in this folder. Ran on CPU; on NPUs never.
set -euo pipefail
cd "$(dirname "$0")/../.."
set -a
# shellcheck source=examples/ascend.env
. examples/ascend.env
set +a
: "${PREFILL_HOST:?the address of this host}" "${SECRET_FILE:=/etc/vllm-ascend-pd/secret}"
exec scripts/prefill.sh --host "$PREFILL_HOST" --port 8001 --secret-file "$SECRET_FILE" "$@"
