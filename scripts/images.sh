#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the images of examples/docker where neither Docker's daemon nor a registry is, and runs them.
#   scripts/images.sh [--in FOLDER]
# For root on Debian. buildah and debootstrap come from Debian's archive into FOLDER (.cache/images by default, 3 GB) and
# are seen by this script alone, in a mount namespace of its own; nothing is installed. The base of both images is a
# Debian with Python instead of the one that they name: their steps are shown, not their bases.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
BASE=localhost/debian-python
folder=$PD_CACHE/images
words=("$@")
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help)
      sed -n '3,7s/^# \?//p' "$0"
      exit 0
      ;;
    --in)
      folder=$(realpath -m "${2:?--in wants a folder}")
      shift 2
      ;;
    *) pd_fail "unknown: $1 (--help)" ;;
  esac
done
if [ "${PD_IN_IMAGES:-}" = "" ]; then
  [ "$(id -u)" = 0 ] || pd_fail "only root may mount, and unpack a system: run it as root"
  exec env PD_IN_IMAGES=1 unshare --mount "$0" "${words[@]}"
fi
mkdir -p "$folder"/{packages,programs/usr,etc,wheels}
PD_SETUP_LOG=$folder/log
: >"$PD_SETUP_LOG"

# pd_step asks for a step's exit code, so `set -e` does not end these: each ends by its first failure through `&&`.
programs() { # what apt would install, unpacked
  local names package
  names=$(apt-get --simulate --no-install-recommends install buildah debootstrap | awk '/^Inst/ { print $2 }') &&
    (cd "$folder/packages" && xargs -r apt-get download <<<"$names") &&
    for package in "$folder"/packages/*.deb; do dpkg -x "$package" "$folder/programs" || return; done
}
debian() {
  # shellcheck source=/dev/null
  rm -rf "$folder/base" && . /etc/os-release && DEBOOTSTRAP_DIR=/usr/share/debootstrap debootstrap --variant=minbase \
    --include=python3,python3-pip,ca-certificates "$VERSION_CODENAME" "$folder/base" &&
    rm -f "$folder"/base/usr/lib/python3*/EXTERNALLY-MANAGED && # as in the images of Python
    cp -L /etc/ssl/certs/ca-certificates.crt "$folder/base/etc/ssl/certs/"
}
base() {
  local made
  made=$(buildah from scratch) && buildah add --quiet "$made" "$folder/base" / &&
    buildah config --env PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
      --env PIP_INDEX_URL="${PIP_INDEX_URL:-https://pypi.org/simple}" "$made" &&
    buildah commit "$made" "$BASE" && buildah rm "$made"
}
wheel() {
  rm -f "$folder"/wheels/*
  VLLM_ASCEND_PD_OPS=0 python3 -m pip wheel --quiet --no-deps --wheel-dir "$folder/wheels" .
}
image() { # role
  buildah bud --isolation chroot --file "examples/docker/$1.Dockerfile" --build-arg BASE="$BASE" \
    --build-arg WHEELS=wheels --tag "vllm-ascend-pd-$1" "$folder"
}
# Without engines the metaserver answers that it can serve nobody, as the user of its image.
serves() {
  local made port answer=
  made=$(buildah from vllm-ascend-pd-metaserver) || return
  port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  timeout 60 buildah run --isolation chroot "$made" -- sh -c \
    "id -u; exec vllm-ascend-pd metaserver --host 127.0.0.1 --port $port" &
  for _ in $(seq 100); do
    answer=$(curl --silent --noproxy '*' --write-out ' %{http_code}' "http://127.0.0.1:$port/serving") && break
    sleep 0.3
  done
  kill %%
  wait
  buildah rm "$made"
  echo "$answer"
  [ "${answer##* }" = 503 ]
}
# vllm-ascend's image would have what the package needs, so here it is only looked for.
installed() {
  local made
  made=$(buildah from vllm-ascend-pd-engine) && buildah run --isolation chroot "$made" -- \
    python3 -c 'from importlib.metadata import version; print("engine", version("vllm-ascend-pd"))' && buildah rm "$made"
}

[ -d "$folder/programs/usr/bin" ] || pd_step "buildah and debootstrap from Debian's archive" programs
mount -t overlay overlay -o lowerdir="$folder/programs/usr":/usr /usr
echo '{"default": [{"type": "insecureAcceptAnything"}]}' >"$folder/etc/policy.json"
printf '[storage]\ndriver = "vfs"\ngraphroot = "%s/store"\nrunroot = "%s/run"\n' "$folder" "$folder" >"$folder/etc/storage.conf"
echo 'unqualified-search-registries = []' >"$folder/etc/registries.conf"
export CONTAINERS_STORAGE_CONF=$folder/etc/storage.conf CONTAINERS_REGISTRIES_CONF=$folder/etc/registries.conf
if [ ! -e /etc/containers/policy.json ]; then
  mkdir -p "$folder/etc/upper" "$folder/etc/work"
  mount -t overlay overlay -o "lowerdir=/etc,upperdir=$folder/etc/upper,workdir=$folder/etc/work" /etc
  mkdir -p /etc/containers && cp "$folder/etc/policy.json" /etc/containers/
fi
if ! buildah inspect --type image "$BASE" >/dev/null 2>&1; then
  pd_step "a Debian with Python" debian
  pd_step "a base of it" base
fi
pd_step "the wheel, without compiled ops" wheel
for role in metaserver engine; do pd_step "$role.Dockerfile" image "$role"; done
pd_step "the metaserver's image serves" serves
pd_step "the engine's image has the package" installed
