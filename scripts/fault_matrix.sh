#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Kills, stops, and makes refuse, prefill, decode and metaserver at each stage of a request: 27 cells, real engines.
# --help shows the flags.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
pd_setup run "$@"
export PD_DEVICE
exec "$PD_PYTHON" -m tools.fault_matrix "$@"
