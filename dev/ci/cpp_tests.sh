#!/bin/bash
# Runs a binary of the C++ tests in two halves of about the same time side by side. Tests of threads set their number;
# elsewhere, handing tiny loops to a second thread costs a fifth of the time.
#
#   dev/ci/cpp_tests.sh build/cpu/tests
set -u
tests=$1
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
"$tests" --source-file='*/parallel/*' >"$tests-ranks.txt" 2>&1 &
half=$!
status=0
"$tests" --source-file-exclude='*/parallel/*' || status=1
wait "$half" || status=1
cat "$tests-ranks.txt"
exit $status
