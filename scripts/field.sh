#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tables of docs/field.md: vllm-ascend's tested P/D configurations that start with this connector. --help has the flags.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
pd_setup run "$@"
exec "$PD_PYTHON" -m tools.field "$@"
