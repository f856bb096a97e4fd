#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One prefill engine that pushes to 4 or to 32 decode ranks at once: time, memory, connections. --help shows the flags.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
pd_setup test "$@"
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD:$PWD/tests
exec "$PD_PYTHON" -m tools.bench_fanout "$@"
