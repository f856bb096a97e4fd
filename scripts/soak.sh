#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A long mixed load on a real pair: every answer compared with a single engine's, servers checked for growth.
# --help shows the flags.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
pd_setup run "$@"
export PD_DEVICE
exec "$PD_PYTHON" -m tools.soak "$@"
