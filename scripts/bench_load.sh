#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Systems of two engines under load, in turns in one run: goodput, times of tokens, and a plot of goodput over rate.
# --help shows the flags.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
pd_setup run "$@"
export PD_DEVICE
if [[ " $* " == *" --vllm-ascend "* ]] && ! pd_wants_help "$@"; then tests/ascend_host/environment.sh 0.23 >/dev/null; fi
exec "$PD_PYTHON" -m tools.bench_load "$@"
