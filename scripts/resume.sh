#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Streams whose decode engine is killed continue with another: real engines, answers compared. --help shows the flags.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
pd_setup run "$@"
export PD_DEVICE
exec "$PD_PYTHON" -m tools.resume "$@"
