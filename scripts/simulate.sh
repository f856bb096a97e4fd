#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Whole clusters on a simulated clock, one per seed, with all kinds of faults; checks the protocol's promises.
#   scripts/simulate.sh --seeds N --from S [--jobs J]     consecutive seeds; exit code 1 if a promise was broken
#   scripts/simulate.sh --front --seeds N --from S        the metaserver's service instead: its clients, its engines
#   scripts/simulate.sh --seed X --trace                  one seed again, event by event
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[[ -x $python ]] || python=python3
export OMP_NUM_THREADS=1
module=simulation.run
[[ ${1:-} == --front ]] && { module=simulation.front.run; shift; }
PYTHONPATH=$root:$root/tests exec "$python" -m "$module" "$@"
