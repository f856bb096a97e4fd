#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One prefill and one decode engine on one host, TP 1 each. Ran on CPU; on NPUs never.
#   examples/1p1d/run.sh --model DIR        then: examples/check.sh http://127.0.0.1:8000 DIR
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=examples/environment.sh
. examples/environment.sh
exec scripts/launch_1p1d.sh --p-tp 1 --d-tp 1 "$@"
