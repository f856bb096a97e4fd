#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A GQA model, prefill TP 4 to decode TP 2. Token-major caches are regrouped by block where that makes spans longer.
#   examples/unequal-tp/gqa.sh --model DIR     look before: vllm-ascend-pd plan --p-tp 4 --d-tp 2 --model DIR
#   then: examples/check.sh http://127.0.0.1:8000 DIR
# TP 4 to 2 ran on CPU; on NPUs never. Do not set prefill.tp_size and decode.tp_size: sizes are learned, and
# vllm-ascend refuses sizes that do not divide each other when it sees these keys.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=examples/environment.sh
. examples/environment.sh
export PD_P_SET=${PD_P_SET:-"regroup=auto staging_destinations=4"}
exec scripts/launch_1p1d.sh --p-tp 4 --d-tp 2 "$@"
