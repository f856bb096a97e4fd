#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What a release of vLLM or vllm-ascend would break, refuse or turn off here, without running it. --help has the flags.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
pd_setup run "$@"
exec "$PD_PYTHON" -m tools.upstream "$@"
