#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prints the interpreter of an environment with the real vllm-ascend, vLLM and torch_npu.
#
#   tests/ascend_host/environment.sh [--why-not] [RELEASE]
#
# RELEASE: 0.30 (.venv-ascend-host, the default) or 0.23 (.venv-ascend-host-0.23), as in requirements/ascend-host-*.txt.
# Environments of their own, because torch_npu without CANN breaks `import torch` for everybody else, and because their
# torch is another than .venv's. What stands in for CANN is built by host_build.py. The second run finds all by its stamp.
# With --why-not it makes nothing: it prints why the environment cannot be made here, or nothing.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh

only_why=
if [ "${1:-}" = --why-not ]; then
  only_why=1
  shift
fi
BASE=0.30
release=${1:-$BASE}
SHARED=requirements/ascend-host.txt
PINS=requirements/ascend-host-$release.txt
name=.venv-ascend-host
if [ "$release" != "$BASE" ]; then name+=-$release; fi
venv=$PD_ROOT/$name
python=$venv/bin/python
began=$EPOCHREALTIME

pip_there() {
  "$python" -m pip --disable-pip-version-check --no-input install --no-deps --no-compile --progress-bar off "$@"
}

# Everything that comes as a wheel, then what is built here: those builds need the first.
wheels() { pip_there -r "$SHARED"; }

# Without cargo on the path vLLM leaves its front end in Rust out. The override makes the version what was asked for,
# without the suffix of a build for no device, with which pip would throw it away.
build_vllm() {
  local pin
  pin=$(grep '^vllm==' "$PINS")
  VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=${pin#*==} PATH="$venv/bin:/usr/bin:/bin" \
    TORCH_DEVICE_BACKEND_AUTOLOAD=0 pip_there --no-build-isolation --no-binary vllm "$pin"
}

# SOC_VERSION stands for the chip that a build on a machine without one cannot ask.
build_vllm_ascend() {
  local pin
  pin=$(grep '^vllm-ascend==' "$PINS")
  COMPILE_CUSTOM_KERNELS=0 SOC_VERSION=ascend910b1 SETUPTOOLS_SCM_PRETEND_VERSION=${pin#*==} PATH="$venv/bin:/usr/bin:/bin" \
    TORCH_DEVICE_BACKEND_AUTOLOAD=0 pip_there --no-build-isolation --no-binary vllm-ascend "$pin"
}

make_venv() {
  local base
  base=$(pd_find_python311) || pd_fail "Python 3.11 is needed: install it, or set PD_BASE_PYTHON"
  : >"$PD_SETUP_LOG"
  pd_debian "$base"
  pd_step "$name from $base" "$base" -m venv --clear "$venv"
  pd_step "torch, torch_npu and what vLLM needs (pinned, 4 GB to download)" wheels
  pd_step "vLLM from its source distribution, for no device" build_vllm
  pd_step "vllm-ascend from its source distribution, without compiled operators" build_vllm_ascend
  printf '%s\n' "$stamp" >"$venv/.stamp"
  pd_say "ready after $(pd_elapsed "$began") s, $(du -sh "$venv" | cut -f1) in $name"
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

if [ -n "$only_why" ]; then
  why_not
  exit 0
fi
[ -f "$PINS" ] || pd_fail "there is no $PINS: 0.30 or 0.23 is wanted"
stamp=$(pd_hash "$SHARED" "$PINS" tests/ascend_host/environment.sh)
is_there() { [ -f "$venv/.stamp" ] && [ "$(<"$venv/.stamp")" = "$stamp" ]; }

mkdir -p "$PD_CACHE"
PD_SETUP_LOG=$PD_CACHE/${name#.venv-}.log
exec 9>"$PD_CACHE/${name#.venv-}.lock"
if ! flock -n 9; then
  pd_say "another set-up of $name is running; waiting for it"
  flock -w "$PD_SETUP_LOCK_TIMEOUT" 9
fi
is_there || make_venv
printf '%s\n' "$python"
