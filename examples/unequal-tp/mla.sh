#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# An MLA model, prefill TP 2 to decode TP 1. Each rank holds the whole latent: prefill ranks share the work, and nothing
# is regrouped.
#   examples/unequal-tp/mla.sh --model DIR     then: examples/check.sh http://127.0.0.1:8000 DIR
# Ran on CPU; on NPUs never.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=examples/environment.sh
. examples/environment.sh
export PD_P_SET=${PD_P_SET:-regroup=never}
exec scripts/launch_1p1d.sh --p-tp 2 --d-tp 1 "$@"
