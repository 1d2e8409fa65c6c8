"""After a change of kernels, beside `make test` and `make bench`: the tests on the device under each tool of
compute-sanitizer."""
import re

from check import show

SANITIZERS = ("memcheck", "racecheck", "initcheck")


def run(check):
    """Leaves out hazards in the library's kernels, which synchronise through barriers that racecheck does not know."""
    check.make("tests_gpu")
    check.describe_gpus()
    for tool in SANITIZERS:
        output = check.run(tool, ["compute-sanitizer", "--tool", tool, check.build / "tests_gpu", "-tce=*device*"],
                           GPU_TEST_SMALL="1")
        ours = [line for line in output.splitlines() if "nvjet" not in line
                and re.search(r"Race reported|^========= (Invalid|Uninitialized)", line)]
        show(output, "SUMMARY")
        print(f"{tool}: {len(ours)} in kernels of this repository")
