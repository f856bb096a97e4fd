#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Cost of a prompt of 1,048,576 tokens beside one of 131,072: reservation, metaserver, plans, memory.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
pd_setup unbuilt "$@"
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD
exec "$PD_PYTHON" -m tools.bench_long "$@"
