#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prints the interpreter of an environment with vLLM 0.23.0, the release that vllm-ascend 0.23.0.post1 pairs with.
#
# Only its Python code, built from the sdist for no device: schedulers and the connector's hooks run, engines do not.
# Like tests/native/npu_env.sh it sees the packages of the main environment behind its own. The second run finds
# everything by its stamp.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh

VLLM=0.23.0
# What its build and its imports need beyond the main environment. pip's build isolation would fetch a CUDA torch.
BUILD=(setuptools==78.1.1 setuptools-rust==1.12.0 setuptools-scm==8.3.1 semantic-version==2.10.0 wheel==0.45.1)
NEEDS=(gguf==0.17.1 diskcache==5.6.3 openai-harmony==0.0.8)

pd_choose_interpreter
main=$PD_PYTHON
venv=$PD_CACHE/vllm023-venv
packages=$("$main" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
stamp="$VLLM $packages $(sha256sum "tests/unit/$(basename "$0")" | cut -c1-16)"

is_there() { [ -f "$venv/.stamp" ] && [ "$(<"$venv/.stamp")" = "$stamp" ]; }

pip_there() {
  "$main" -m pip --disable-pip-version-check --no-input --python "$venv/bin/python" install --no-deps --progress-bar off "$@"
}

build_vllm() {
  # Without cargo on the path: the front end in Rust is left out then. With the override the version is the one that was asked for, without which pip throws the build away.
  VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$VLLM PATH="$venv/bin:/usr/bin:/bin" \
    pip_there --no-build-isolation --no-binary vllm "vllm==$VLLM" || return
  # vLLM chooses its CPU platform by the version's suffix, which a build for no device does not have.
  sed -i "s/^Version: $VLLM\$/Version: $VLLM+cpu/" "$venv"/lib/python*/site-packages/vllm-"$VLLM".dist-info/METADATA
}

make_venv() {
  pd_step "an environment beside $main" "$main" -m venv --clear --without-pip "$venv"
  printf '%s\n' "$packages" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth"
  pd_step "what building vLLM $VLLM needs" pip_there "${BUILD[@]}" "${NEEDS[@]}"
  pd_step "vLLM $VLLM for no device" build_vllm
  printf '%s\n' "$stamp" >"$venv/.stamp"
}

mkdir -p "$PD_CACHE"
exec 9>"$PD_CACHE/vllm023-venv.lock"
flock -w "$PD_SETUP_LOCK_TIMEOUT" 9
is_there || make_venv
printf '%s\n' "$venv/bin/python"
