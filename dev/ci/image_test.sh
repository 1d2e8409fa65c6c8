#!/bin/bash
# Build the Dockerfile with buildah on a base image made by debootstrap, and run `make smoke` in it. Needs
# no registry, no daemon and no GPU; needs root rights. buildah and debootstrap are installed where they are missing.
#
#   dev/ci/image_test.sh           on Ubuntu 24.04, the system of the Dockerfile's own base
#   dev/ci/image_test.sh jammy     on another release of Ubuntu
#
# The base has no CUDA toolkit, unlike NVIDIA's image, so the image builds for the CPU. Exit status: 0 passed, 1
# failed, 77 skipped (the reason is printed).
set -u
cd "$(dirname "$0")/../.." || exit 1
suite=${1:-noble}

skip() { echo "image_test.sh: skipped: $1" >&2; exit 77; }
[ "$(id -u)" = 0 ] || skip "a new root needs root rights"
needed=()
command -v buildah >/dev/null || needed+=(buildah)
command -v debootstrap >/dev/null || needed+=(debootstrap)
if [ ${#needed[@]} != 0 ]; then
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${needed[@]}"; } \
        >/dev/null 2>&1 || skip "cannot install ${needed[*]}"
fi

work=$(mktemp -d)
# buildah keeps everything in this folder, and needs neither a daemon nor namespaces.
image() { buildah --root "$work/storage" --runroot "$work/run" --storage-driver vfs "$@"; }
cleanup() {
    image rm --all >/dev/null 2>&1
    rm -rf --one-file-system "$work"
}
trap cleanup EXIT
quietly() { "$@" >"$work/log" 2>&1 || { tail -n 30 "$work/log" >&2; return 1; }; }

echo "== base image: Ubuntu $suite"
keyring=/usr/share/keyrings/ubuntu-archive-keyring.gpg
check=--keyring=$keyring
if [ ! -e "$keyring" ]; then
    echo "note: no $keyring (package ubuntu-keyring): signatures of Ubuntu's packages are not verified"
    check=--no-check-gpg
fi
# Debian's debootstrap has no scripts for new releases of Ubuntu; the script of an old release works for them.
quietly debootstrap --variant=minbase --components=main,universe --include=ca-certificates "$check" \
    "$suite" "$work/base" "" /usr/share/debootstrap/scripts/gutsy || skip "debootstrap failed"
base=$(image from scratch) || exit 1
image copy -q "$base" "$work/base" / >/dev/null || exit 1
image commit -q "$base" llmfp8-base >/dev/null || exit 1
image rm "$base" >/dev/null
rm -rf --one-file-system "$work/base"

echo "== Dockerfile"
mkdir "$work/context"
git ls-files -z | tar -c --null -T - | tar -x -C "$work/context" || exit 1
quietly image build --isolation chroot --from llmfp8-base --build-arg COMMIT=0123456789ab -t llm.fp8 \
    "$work/context" || exit 1

echo "== make smoke"
container=$(image from llm.fp8) || exit 1
# shellcheck disable=SC2016
image run --isolation chroot "$container" -- bash -c '. /etc/os-release; echo "$PRETTY_NAME"
    make smoke && ./train_llama --version | grep "commit 0123456789ab"' || exit 1
