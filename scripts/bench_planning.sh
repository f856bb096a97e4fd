#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Time to plan a step in milliseconds per 1,000 blocks, which must not grow with the blocks already sent.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
pd_setup unbuilt "$@"
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD
exec "$PD_PYTHON" -m tools.bench_planning "$@"
