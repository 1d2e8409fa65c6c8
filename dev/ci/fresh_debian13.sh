#!/bin/bash
# Build and smoke-test the tracked files of this checkout in a new Debian 13 root, run the tests of several ranks
# (Debian 13 has OpenMPI 5, Debian 12 has OpenMPI 4), then compile its host code with clang. Needs root rights, and
# debootstrap, which is installed where it is missing. Exit status: 0 passed, 1 failed, 77 skipped (the reason is
# printed).
set -u
cd "$(dirname "$0")/../.." || exit 1

skip() { echo "fresh_debian13.sh: skipped: $1" >&2; exit 77; }
[ "$(id -u)" = 0 ] || skip "a new root needs root rights"
if ! command -v debootstrap >/dev/null; then
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends debootstrap; } \
        >/dev/null 2>&1
    command -v debootstrap >/dev/null || skip "debootstrap is missing and cannot be installed"
fi

root=$(mktemp -d)
log=$(mktemp)
cleanup() {
    # The content of a mount must not be removed with the folder.
    local folder
    for folder in proc sys dev/shm; do
        mountpoint -q "$root/$folder" && ! umount -l "$root/$folder" && return
    done
    rm -rf --one-file-system "$root"
    rm -f "$log"
}
trap cleanup EXIT

quietly() { "$@" >"$log" 2>&1 || { tail -n 30 "$log" >&2; return 1; }; }
quietly debootstrap --variant=minbase --include=make,ca-certificates trixie "$root" || skip "debootstrap failed"
mount -t proc proc "$root/proc" || exit 1
# hwloc, which OpenMPI asks about the machine, warns on standard error where it finds no /sys. What is mounted
# below /sys is left out (no --rbind), since unmounting it here would unmount it on the host, too.
mount --bind /sys "$root/sys" || exit 1
mkdir -p "$root/dev/shm" && mount -t tmpfs tmpfs "$root/dev/shm" || exit 1
mkdir "$root/src"
git ls-files -z | tar -c --null -T - | tar -x -C "$root/src" || exit 1

inside() {
    chroot "$root" env -i -C /src PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp DEBIAN_FRONTEND=noninteractive "$@"
}
echo "== Debian 13: make smoke"
inside make smoke | tee "$log"
[ "${PIPESTATUS[0]}" = 0 ] || exit 1
while read -r line; do
    grep -qxF "$line" "$log" || { echo "README.md shows another line of make smoke: $line" >&2; exit 1; }
done < <(grep 'bigram entropy [0-9]' README.md)

echo "== Debian 13: tests of several ranks"
failed=0
inside make test-ranks || failed=1

echo "== Debian 13: host code under clang"
quietly inside apt-get install -y --no-install-recommends clang libomp-dev || exit 1
inside make CXX=clang++ DEVICE=cpu TABLE=0 syntax || failed=1
exit $failed
