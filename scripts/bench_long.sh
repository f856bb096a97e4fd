#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Cost of a prompt of 1,048,576 tokens beside one of 131,072: reservation, metaserver, plans, memory.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[[ -x $python ]] || python=python3
export OMP_NUM_THREADS=1
PYTHONPATH=$root exec "$python" "$root/tools/bench_long.py" "$@"
