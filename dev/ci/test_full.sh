#!/bin/bash
# The part of `make test-full` beyond `make test`: the CPU suite under AddressSanitizer and UBSan, the threads of the
# data loader under ThreadSanitizer, the long tests, 2,000 sets of options with the day's seed and the faults that such
# sets must show, each fuzzer for FUZZ_SECONDS (60), a tenth of the drill with the day's seed, the comparison with
# transformers and torch (3 GB of packages), training on two hosts under Slurm and ssh, and the Dockerfile. Every part
# runs even if one before it failed; the last three are skipped, with the reason, where they cannot run.
set -u
cd "$(dirname "$0")/../.." || exit 1
seconds=${FUZZ_SECONDS:-60}
failed=()

part() {
    local name=$1
    shift
    echo "=== $name"
    "$@" || { failed+=("$name"); echo "=== $name: FAILED" >&2; }
}

build() { make DEVICE=cpu TABLE=0 "$@"; }

sanitized_suite() {
    build VARIANT=asan tests &&
        ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1 \
            dev/ci/cpp_tests.sh build/cpu-asan/tests
}
# The threads that read data, write checkpoints and post heartbeats; the sanitizer does not know the barriers of
# OpenMP's threads.
threads() {
    local tests=build/cpu-tsan/tests cases pattern
    cases=("data:*" "heartbeats:*" "watchdog: a library*" "*async: the saved state*"
           "*async: the files*" "*async: a failure*" "*async: an error*")
    build VARIANT=tsan tests || return 1
    for pattern in "${cases[@]}"; do   # doctest passes where a pattern names no case
        "$tests" --list-test-cases --test-case="$pattern" | grep -q "passing the current filters: [1-9]" ||
            { echo "no test case has the name $pattern" >&2; return 1; }
    done
    "$tests" --test-case="$(IFS=,; echo "${cases[*]}")"
}
long_tests() {
    build all tests && LLMC_FULL=1 build/cpu/tests &&
        LLMC_FULL=1 LLMC_BUILD=$PWD/build/cpu python3 tests/run.py test_walkthrough
}

composed_sets() {
    OMP_NUM_THREADS=1 LLMC_SETS=2000 LLMC_SEED=$(date +%j) build/cpu/tests --test-case="composition: random*"
}

fuzz() {
    local name=$1 corpus
    corpus=build/cpu/corpus/$name
    mkdir -p "$corpus"
    # If the repository has seeds for this fuzzer, they are read but never changed.
    local seeds=()
    [ -d "tests/fuzz/corpus/$name" ] && seeds=("tests/fuzz/corpus/$name")
    "build/cpu/$name" -max_total_time="$seconds" -rss_limit_mb=2048 -timeout=20 -print_final_stats=1 -verbosity=0 \
        -artifact_prefix="build/cpu/$name-" "$corpus" "${seeds[@]}"
}

drill() {
    build all build/cpu/faults/train_llama build/cpu/faults/train_gpt2 &&
        LLMC_BUILD=$PWD/build/cpu python3 tests/drill/run.py --scale 0.1 --seed "$(date +%j)"
}

with_transformers() {
    local venv=build/transformers
    build all tests || return 1
    { python3 -m venv "$venv" &&
          "$venv/bin/pip" install --quiet torch==2.15.0 transformers==5.24.0 safetensors==0.8.0; } ||
        { echo "the packages cannot be installed here: skipped" >&2; return 77; }
    LLMC_BUILD=$PWD/build/cpu "$venv/bin/python" tests/run.py end_to_end.test_transformers &&
        PYTHON=$venv/bin/python build/cpu/tests --test-case="transformers computes*"
}

unless_skipped() {
    "$@"
    local status=$?
    [ "$status" = 0 ] || [ "$status" = 77 ]
}

part "ASan and UBSan" sanitized_suite
part "TSan" threads
part "long tests" long_tests
part "2,000 sets of options" composed_sets
part "planted faults" dev/ci/planted_faults.py
if ! command -v clang++ >/dev/null; then
    echo "=== fuzzing: clang++ is not installed: skipped" >&2
else
    part "build of the fuzzers" build fuzzers
    for source in tests/fuzz/fuzz_*.cpp; do
        part "fuzzing $(basename "$source" .cpp), $seconds s" fuzz "$(basename "$source" .cpp)"
    done
fi
part "a tenth of the drill" drill
part "transformers and torch" unless_skipped with_transformers
part "two hosts" unless_skipped dev/ci/cluster_test.sh
part "Dockerfile" unless_skipped dev/ci/image_test.sh

if [ ${#failed[@]} -gt 0 ]; then
    echo "test-full: failed: ${failed[*]}" >&2
    exit 1
fi
echo "test-full: all parts passed"
