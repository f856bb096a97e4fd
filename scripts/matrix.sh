#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the rows of docs/matrix.md, resumably, or writes the page from their results. --help shows the flags.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
pd_setup test "$@"
export PD_DEVICE
exec "$PD_PYTHON" -m tools.matrix "$@"
