#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Time to plan a step in milliseconds per 1,000 blocks, which must not grow with the blocks already sent.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[[ -x $python ]] || python=python3
export OMP_NUM_THREADS=1
PYTHONPATH=$root exec "$python" "$root/tools/bench_planning.py" "$@"
