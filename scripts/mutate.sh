#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Small random changes of the package's own code, one at a time, each against the tests that should detect it.
#   scripts/mutate.sh --mutants 200 --seed S [--folder protocol …] [--only N]      exit code 1 if one survived
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[[ -x $python ]] || python=python3
export OMP_NUM_THREADS=1
PYTHONPATH=$root exec "$python" -m tools.mutate "$@"
