#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Whole clusters on a simulated clock, one per seed, with all kinds of faults; checks the protocol's promises.
#   scripts/simulate.sh --seeds N --from S [--jobs J]     consecutive seeds; exit code 1 if a promise was broken
#   scripts/simulate.sh --front --seeds N --from S        the metaserver's service instead: its clients, its engines
#   scripts/simulate.sh --seed X --trace                  one seed again, event by event
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
pd_setup unbuilt "$@"
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD:$PWD/tests
module=simulation.run
if [ "${1:-}" = --front ]; then
  module=simulation.front.run
  shift
fi
exec "$PD_PYTHON" -m "$module" "$@"
