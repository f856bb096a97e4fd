#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prints the interpreter of .venv-ascend-host: the real vllm-ascend, vLLM and torch_npu of requirements/ascend-host.txt.
#
# An environment of its own, because torch_npu without CANN breaks `import torch` for everybody else, and because its torch
# is another than .venv's. What stands in for CANN is built by host_build.py. The second run finds all by its stamp.
# With --why-not it makes nothing: it prints why the environment cannot be made here, or nothing.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh

REQUIREMENTS=requirements/ascend-host.txt
venv=$PD_ROOT/.venv-ascend-host
python=$venv/bin/python
began=$EPOCHREALTIME

pip_there() { "$python" -m pip --disable-pip-version-check --no-input install --no-deps --progress-bar off "$@"; }

# Everything that comes as a wheel, then what is built here: those builds need the first.
wheels() { pip_there -r <(grep -vE '^vllm(-ascend)?==' "$REQUIREMENTS"); }

# Without cargo on the path vLLM leaves its front end in Rust out. The override makes the version what was asked for,
# without the suffix of a build for no device, with which pip would throw it away.
build_vllm() {
  local pin
  pin=$(grep '^vllm==' "$REQUIREMENTS")
  VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=${pin#*==} PATH="$venv/bin:/usr/bin:/bin" \
    TORCH_DEVICE_BACKEND_AUTOLOAD=0 pip_there --no-build-isolation --no-binary vllm "$pin"
}

# SOC_VERSION stands for the chip that a build on a machine without one cannot ask.
build_vllm_ascend() {
  local pin
  pin=$(grep '^vllm-ascend==' "$REQUIREMENTS")
  COMPILE_CUSTOM_KERNELS=0 SOC_VERSION=ascend910b1 SETUPTOOLS_SCM_PRETEND_VERSION=${pin#*==} PATH="$venv/bin:/usr/bin:/bin" \
    TORCH_DEVICE_BACKEND_AUTOLOAD=0 pip_there --no-build-isolation --no-binary vllm-ascend "$pin"
}

make_venv() {
  local base
  base=$(pd_find_python311) || pd_fail "Python 3.11 is needed: install it, or set PD_BASE_PYTHON"
  : >"$PD_SETUP_LOG"
  pd_debian "$base"
  pd_step "${venv#"$PD_ROOT"/} from $base" "$base" -m venv --clear "$venv"
  pd_step "torch, torch_npu and what vLLM needs (pinned, 4 GB to download)" wheels
  pd_step "vLLM from its source distribution, for no device" build_vllm
  pd_step "vllm-ascend from its source distribution, without compiled operators" build_vllm_ascend
  printf '%s\n' "$stamp" >"$venv/.stamp"
  pd_say "ready after $(pd_elapsed "$began") s, $(du -sh "$venv" | cut -f1) in ${venv#"$PD_ROOT"/}"
}

why_not() {
  local free machine
  free=$(df --output=avail -BG . | tail -n 1 | tr -dc 0-9)
  machine=$(uname -m)
  if [ "$machine" != x86_64 ]; then
    printf '%s\n' "vllm-ascend's stand-ins are for x86-64, and this machine is $machine. Run them on x86-64"
  elif [ ! -d "$venv" ] && [ "$free" -lt 20 ]; then
    printf '%s\n' "their environment needs 8 GB, of 20 GB free, and $free GB are free. Make room and run again"
  fi
}

if [ "${1:-}" = --why-not ]; then
  why_not
  exit 0
fi
stamp=$(pd_hash "$REQUIREMENTS" tests/ascend_host/environment.sh)
is_there() { [ -f "$venv/.stamp" ] && [ "$(<"$venv/.stamp")" = "$stamp" ]; }

mkdir -p "$PD_CACHE"
PD_SETUP_LOG=$PD_CACHE/ascend-host.log
exec 9>"$PD_CACHE/ascend-host.lock"
if ! flock -n 9; then
  pd_say "another set-up of .venv-ascend-host is running; waiting for it"
  flock -w "$PD_SETUP_LOCK_TIMEOUT" 9
fi
is_there || make_venv
printf '%s\n' "$python"
