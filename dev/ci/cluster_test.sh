#!/bin/bash
# Train on two hosts, which are namespaces of this machine, under Debian's Slurm and over ssh
# (tests/cluster/). Missing packages are installed; nothing else remains after this command. Exit status: 0 passed, 1
# failed, 77 skipped (the reason is printed).
set -u
cd "$(dirname "$0")/../.." || exit 1

skip() { echo "cluster_test.sh: skipped: $1" >&2; exit 77; }
[ "$(id -u)" = 0 ] || skip "hosts made of namespaces need root rights; run: sudo make cluster-test"
scripts/setup.sh cluster || skip "packages are missing"
export PATH=$PATH:/usr/sbin:/sbin
reason=$(unshare --mount --uts --ipc --net --pid --fork ip link add type veth 2>&1) ||
    skip "this system does not let root make namespaces with a network: $reason"

make DEVICE=cpu TABLE=0 build/cpu/train_gpt2 build/cpu/faults/train_gpt2 || exit 1

ulimit -c 0   # a crash leaves no file either
# The hosts end with the process that runs the tests.
TMPDIR=$(mktemp -d) || exit 1
export TMPDIR LLMC_BUILD=$PWD/build/cpu
setpriv --pdeathsig KILL python3 -m unittest -v tests.cluster.with_slurm tests.cluster.with_ssh &
tests=$!
cleanup() {
    kill -KILL "$tests" 2>/dev/null && sleep 1
    rm -rf "$TMPDIR"
}
trap cleanup EXIT
wait "$tests"
