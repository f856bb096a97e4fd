#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Streams whose decode engine is killed continue with another: real engines, answers compared. --help shows the flags.
#   scripts/resume.sh --vllm-ascend …    with vllm-ascend's engines in host memory, whose D's drop requests too
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
pd_setup run "$@"
export PD_DEVICE
if [ "${1:-}" = --vllm-ascend ]; then # in host memory: tests/ascend_host
  shift
  exec "$PD_PYTHON" tests/ascend_host/resume.py "$@"
fi
exec "$PD_PYTHON" -m tools.resume "$@"
