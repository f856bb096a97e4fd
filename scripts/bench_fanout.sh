#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One prefill engine that pushes to 4 or to 32 decode ranks at once: time, memory, connections. --help shows the flags.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[[ -x $python ]] || python=python3
export OMP_NUM_THREADS=1
PYTHONPATH=$root:$root/tests exec "$python" "$root/tools/bench_fanout.py" "$@"
