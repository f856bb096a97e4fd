#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes what a release consists of, and shows that it works: a dry run of .github/workflows/release.yml, which calls this.
#   scripts/release.sh [--to FOLDER] [--tag v1.2.3]
# The source archive, the wheel (built from that archive, not from the clone), their SHA256SUMS; then the wheel outside
# of the clone: the router's commands in an environment without torch and vLLM, the ops with the installed torch.
# Publishes nothing. --to: dist by default, which must not exist or be empty. --tag: must be the package's version.
# PYTHON: an interpreter with torch >= 2.10 and setuptools; by default that of scripts/setup.sh. With auditwheel the
# wheel gets a manylinux tag, which PyPI wants.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh

to=dist
tag=
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help)
      sed -n '3,10s/^# \?//p' "$0"
      exit 0
      ;;
    --to)
      to=${2:?--to wants a folder}
      shift 2
      ;;
    --tag)
      tag=${2:?--tag wants a tag, as v1.2.3}
      shift 2
      ;;
    *) pd_fail "unknown: $1 (--help)" ;;
  esac
done
[ -z "$(ls -A "$to" 2>/dev/null)" ] || pd_fail "$to is not empty: give another folder by --to"
if [ -z "${PYTHON:-}" ]; then
  pd_setup test
  PYTHON=$PD_PYTHON
fi
version=$("$PYTHON" setup.py --version 2>/dev/null | tail -n 1)
[ -z "$tag" ] || [ "$tag" = "v$version" ] || pd_fail "the tag is $tag and __version__ is $version: change one of them"
mkdir -p "$to"
to=$(realpath "$to")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

step() { # text command…
  local text=$1 began=$EPOCHREALTIME
  shift
  if ! "$@" >"$work/log" 2>&1 </dev/null; then
    tail -n 30 "$work/log" | sed 's/^/[release]   | /' >&2
    pd_fail "$text: failed"
  fi
  printf '[release] %s: good, %s s\n' "$text" "$(pd_elapsed "$began")" >&2
}

archive() {
  "$PYTHON" -c 'import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])' "$to"
}
wheel() {
  mkdir "$work/raw"
  tar -xzf "$to/vllm_ascend_pd-$version.tar.gz" -C "$work"
  (
    cd "$work/vllm_ascend_pd-$version"
    "$PYTHON" -c 'import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])' "$work/raw"
  )
  if "$PYTHON" -c 'import auditwheel' 2>/dev/null; then
    # torch's libraries come from the installed torch, never from the wheel.
    "$PYTHON" -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' -w "$to" "$work"/raw/*.whl
  else
    cp "$work"/raw/*.whl "$to"
  fi
}
# The metaserver and plan, where nothing else is installed.
bare() {
  "$PYTHON" -m venv "$work/bare"
  "$work/bare/bin/pip" install -q --find-links "$to" "vllm-ascend-pd[metaserver]==$version"
  if "$work/bare/bin/python" -c 'import torch' 2>/dev/null; then pd_fail "the environment is not bare: it has torch"; fi
  (
    cd "$work"
    local command
    for command in metaserver sidecar plan trace; do bare/bin/vllm-ascend-pd "$command" --help >/dev/null; done
  )
}
ops() {
  "$PYTHON" -m zipfile -e "$to"/vllm_ascend_pd-"$version"-*.whl "$work/installed"
  cp tools/check_wheel.py "$work"
  (cd "$work" && PYTHONPATH=$work/installed "$PYTHON" check_wheel.py)
}

step "source archive" archive
step "wheel, from that archive" wheel
step "the wheel without torch and vLLM" bare
step "the wheel's ops" ops
(cd "$to" && sha256sum -- * | tee SHA256SUMS)
