#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What vllm-ascend tests as P and D: would it start with this connector? docs/field.md is printed by it; --help has the flags.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
pd_setup run
exec "$PD_PYTHON" -m scripts.field "$@"
