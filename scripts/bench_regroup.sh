#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Benefit of regrouping: writes and bytes per write of the busiest prefill rank. --help shows the flags.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
pd_setup unbuilt "$@"
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD
exec "$PD_PYTHON" -m tools.bench_regroup "$@"
