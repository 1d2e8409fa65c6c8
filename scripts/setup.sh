#!/bin/sh
# Install what `make smoke`, `make test`, `make cluster-test` or the test of reports in a browser needs and is missing,
# from the packages of Debian or Ubuntu. As root, or through sudo if it asks no password; otherwise print the line to
# run and exit 2.
# Usage: scripts/setup.sh [smoke|test|cluster|browser]
set -u
purpose=${1:-test}
case $purpose in
    smoke | test | cluster | browser) ;;
    *) echo "setup.sh: unknown purpose '$purpose', use smoke, test, cluster or browser" >&2; exit 2 ;;
esac

have_command() { command -v "$1" >/dev/null 2>&1; }
have_daemon() { PATH=$PATH:/usr/sbin:/sbin have_command "$1"; }
# A header counts as present if the compiler finds it, in a package or in a folder of CPPFLAGS.
have_header() {
    if have_command g++; then
        # CPPFLAGS is a list of words.
        # shellcheck disable=SC2086
        printf '#include <%s>\n' "$1" | g++ ${CPPFLAGS:-} -std=c++20 -E -x c++ - >/dev/null 2>&1
    else
        test -e "/usr/include/$1"
    fi
}
# PyYAML of the python3 that runs the tests, or of Debian's. If only Debian's has it, the tests of YAML are skipped.
have_yaml() { python3 -c 'import yaml' >/dev/null 2>&1 || test -d /usr/lib/python3/dist-packages/yaml; }
missing_packages() {
    if [ "$purpose" = browser ]; then
        have_command chromium || have_command google-chrome || echo chromium
        return
    fi
    have_command g++ || echo g++
    have_command make || echo make
    have_command python3 || echo python3
    have_header nlohmann/json.hpp || echo nlohmann-json3-dev
    have_header xxhash.h || echo libxxhash-dev
    if [ "$purpose" != smoke ]; then
        have_header doctest/doctest.h || echo doctest-dev
        # scripts/import_config reads YAML through it.
        have_yaml || echo python3-yaml
        # Several ranks on one machine; runs of one rank need no MPI.
        have_command mpicxx || echo libopenmpi-dev
        have_command mpirun || echo openmpi-bin
    fi
    if [ "$purpose" = cluster ]; then
        have_daemon slurmctld || echo slurmctld
        have_daemon slurmd || echo slurmd
        have_command sbatch || echo slurm-client
        have_daemon munged || echo munge
        # srun --mpi=pmix opens libpmix.so by this name.
        ls /usr/lib/*/libpmix.so >/dev/null 2>&1 || echo libpmix-dev
        have_daemon sshd || echo openssh-server
        have_command ssh || echo openssh-client
        have_daemon ip || echo iproute2
    fi
}

missing=$(missing_packages | tr '\n' ' ')
[ -z "$missing" ] && exit 0

install="apt-get install -y --no-install-recommends $missing"
if ! have_command apt-get; then
    echo "setup.sh: missing: $missing(names of Debian packages); this system has no apt-get, install them by hand" >&2
    exit 2
fi
if [ "$(id -u)" = 0 ]; then
    as_root=""
elif have_command sudo && sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    echo "setup.sh: missing packages; run: sudo $install" >&2
    exit 2
fi

echo "setup: installing $missing"
log=$(mktemp)
no_start=""
trap 'rm -f "$log"; [ -z "$no_start" ] || $as_root rm -f "$no_start"' EXIT
# The tests start daemons of their own; Debian starts none while this file says so.
if [ "$purpose" = cluster ] && [ ! -e /usr/sbin/policy-rc.d ]; then
    no_start=/usr/sbin/policy-rc.d
    printf '#!/bin/sh\nexit 101\n' | $as_root tee "$no_start" >/dev/null
    $as_root chmod +x "$no_start"
fi
export DEBIAN_FRONTEND=noninteractive
# Fresh images have no package lists; a failed update does no harm if the lists are there.
{ $as_root apt-get update; $as_root env DEBIAN_FRONTEND=noninteractive $install; } >"$log" 2>&1
still=$(missing_packages | tr '\n' ' ')
if [ -n "$still" ]; then
    tail -n 20 "$log" >&2
    echo "setup.sh: could not install $still; run: sudo $install" >&2
    exit 2
fi
