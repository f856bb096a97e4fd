#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GB/s of the CPU ops beside memcpy and torch. Arguments go to tools/bench_ops.py (--help lists them).
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
pd_setup run "$@"

# In virtual machines glibc often assumes a last-level cache of hundreds of MiB and then never uses streaming stores. A
# realistic threshold makes memcpy as fast as it can be.
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.cpu.x86_non_temporal_threshold=0x1000000}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "$PD_PYTHON" -m tools.bench_ops "$@"
