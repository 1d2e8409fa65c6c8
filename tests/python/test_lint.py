"""Each rule of dev/ci/lint.py must find a violation, and must accept similar text without one."""
import unittest

import lint

HEADER = "// Math: y = x\n// Source: none\n// Traffic: N\n// Requires: N > 0\n// Parallel: a thread an element\n"
LAUNCH = "k<<<1, 256, f(1, 2), stream>>>(x);\n"
MARK = "TO" + "DO"

# rule name -> ([(path, violating text)], [(path, correct text)])
CASES = {
    "launches": ([("llmc/model/decoder.cpp", LAUNCH), ("llmc/cuda/a.cu", "k<<<1, 2>>>(x);\n"),
                  ("dev/bench/a.cu", "k<<<dim3(1,\n 2, 3), 2, 0>>>(x);\n")],
                 [("llmc/cuda/a.cu", LAUNCH), ("llmc/model/decoder.cpp", "// k<<<1>>>\nconst char* a = \"<<<\";\n")]),
    "cuda_symbols": ([("llmc/model/decoder.cpp", "cudaFree(p);\n"), ("llmc/model/linear.h", "#include <cublasLt.h>\n"),
                      ("tests/test_a.cpp", "#include <cuda_bf16.h>\n"), ("train_gpt2.cu", "__global__ void k() {}\n")],
                     [("llmc/cuda/a.cu", "cudaFree(p);\n"), ("llmc/cuda/device.cu", "#include <cublasLt.h>\n"),
                      ("llmc/ops/ops.h", "namespace cuda {}  // cudaFree\n")]),
    "communication_symbols": ([("llmc/model/decoder.cpp", "MPI_Init(0, 0);\n"),
                               ("llmc/parallel/zero.cpp", "ncclComm_t c;\n"),
                               ("llmc/cuda/a.cu", "#include <nccl.h>\n"), ("tests/test_a.cpp", "MPI_Init(0, 0);\n")],
                              [("llmc/parallel/comm/comm_mpi.cpp", "#include <mpi.h>\nMPI_Init(0, 0);\n"),
                               ("llmc/parallel/comm/comm_nccl.cpp", "ncclComm_t c;\n"), ("README.md", "MPI_Init\n")]),
    "includes": ([("llmc/base/rng.h", '#include "llmc/config/config.h"\n'),
                  ("llmc/config/config.h", '#include "llmc/ops/device.h"\n'),
                  ("llmc/cpu/a.cpp", '#include "llmc/model/parameters/params.h"\n'),
                  ("llmc/cuda/a.cu", '#include "llmc/parallel/comm/comm.h"\n'),
                  ("llmc/cuda/a.cu", '#include "llmc/cpu/math.h"\n'), ("llmc/nobody.cpp", "int x;\n"),
                  ("llmc/model/linear.cpp", '#include "ops.h"\n'),
                  ("llmc/parallel/comm/comm.h", '#include "llmc/train/trainer.h"\n'),
                  ("llmc/parallel/comm/comm.h", '#include "llmc/parallel/groups.h"\n'),
                  ("llmc/model/parameters/params.h", '#include "llmc/model/linear.h"\n')],
                 [("llmc/train/trainer.h", '#include "llmc/model/decoder.h"\n#include <vector>\n'),
                  ("llmc/cuda/a.cu", '#include "llmc/ops/ops.h"\n#include "llmc/cuda/common.cuh"\n'),
                  ("llmc/base/rng.h", '// #include "llmc/config/config.h"\n'),
                  ("llmc/parallel/zero/buckets.h", '#include "llmc/parallel/groups.h"\n'),
                  ("llmc/model/linear.h", '#include "llmc/model/parameters/params.h"\n'),
                  ("tests/test_a.cpp", '#include "llmc/train/trainer.h"\n')]),
    "one_build": ([("llmc/cpu/a.cpp", "device::synchronize(ctx);\n"), ("llmc/cpu/a.h", "#ifdef LLMC_CUDA\n"),
                   ("llmc/cpu/a.cpp", '#include "llmc/ops/owned.h"\n')],
                  [("llmc/cpu/stream.cpp", "device::synchronize(ctx);\n"), ("llmc/cpu/a.cpp", "// device::x\n"),
                   ("llmc/model/a.cpp", "device::synchronize(ctx);\n")]),
    "inline_assembly": ([("llmc/cuda/a.cu", 'asm volatile("x;");\n'), ("llmc/cpu/a.cpp", '__asm__("nop");\n')],
                        [("llmc/cuda/ptx.cuh", 'asm volatile("x;");\n'), ("llmc/cpu/a.cpp", "// asm(\n")]),
    "kernel_headers": ([("llmc/cuda/a.cu", "__global__ void k(int n) {\n}\n"),
                        ("llmc/cuda/a.cu", HEADER.replace("// Traffic: N\n", "") + "__global__ void k() {\n}\n"),
                        ("llmc/cuda/a.cu", HEADER + "\nint x;\n__global__ void k() {\n}\n")],
                       [("llmc/cuda/a.cu", HEADER + "__global__ void k() {\n}\n"),
                        ("llmc/cuda/a.cu", HEADER + "template <typename T, int kSize>\n"
                         "__global__ void __launch_bounds__(256) k(const T* x) {\n}\n"),
                        ("llmc/cuda/a.cu", "__global__ void k(int n);\n"),
                        ("dev/bench/bench_a.cu", "__global__ void k() {}\n")]),
    "file_length": ([("llmc/a.cpp", "\n" * 501), ("train_gpt2.cu", "\n" * 151)],
                    [("llmc/a.cpp", "\n" * 500), ("train_gpt2.cu", "\n" * 150), ("README.md", "\n" * 900)]),
    "line_width": ([("llmc/a.cpp", "x" * 121), ("Makefile", "\n" + "x" * 121)],
                   [("llmc/a.cpp", "x" * 120 + "\n"), ("README.md", "x" * 300)]),
    "white_space": ([("llmc/a.cpp", "\tint x;\n"), ("llmc/a.cpp", "int x; \nint y;\n"), ("dev/a.py", "x = 1")],
                    [("llmc/a.cpp", "int x;\n\nint y;\n"), ("Makefile", "a:\n\tb\n")]),
    "machine_paths": ([("README.md", "see /ho" + "me/me/x\n"), ("llmc/a.cpp", 'f("/ro' + 'ot/x");\n')],
                      [("README.md", "/usr/local/cuda/bin, a/homework\n")]),
    "unfinished": ([("llmc/a.cpp", f"// {MARK}: later\n"), ("dev/a.py", f"# {MARK}\n")],
                   [("llmc/a.cpp", "// to do it well\n")]),
    "namespaces": ([("llmc/a.cpp", "using namespace std;\n"), ("llmc/a.h", "extern int counter;\n")],
                   [("llmc/a.cpp", "extern const char* const kName;\nextern \"C\" int f(int);\nnamespace a = std;\n")]),
    "fast_math": ([("Makefile", "F := -O3 -ffast-math\n"), ("dev/a.mk", "F := --use_fast_math\n"),
                   ("llmc/cpu/a.cpp", '#pragma GCC optimize("Ofast")\n')],
                  [("Makefile", "F := -ffp-contract=off  # never -ffast-math\n")]),
    "json_values": ([("Makefile", "DEFINES := -I.\n"),
                     ("llmc/train/a.cpp", '#include <nlohmann/json.hpp>\nbool a = j["type"] == "header";\n'),
                     ("llmc/train/a.cpp", '#include <nlohmann/json.hpp>\nbool a = x != j.at("type");\n')],
                    [("Makefile", "DEFINES := -DJSON_USE_IMPLICIT_CONVERSIONS=0\n"),
                     ("llmc/train/a.cpp", '#include <nlohmann/json.hpp>\nbool a = x == j["type"].get<int>();\n'),
                     ("llmc/train/a.cpp", 'bool a = map["type"] == 3;\n')]),
    "file_system": ([("llmc/data/a.cpp", "if (std::filesystem::exists(path)) f();\n"),
                     ("llmc/train/a.cpp", "namespace fs = std::filesystem;\nauto a = fs::canonical(x, error);\n"),
                     ("llmc/train/a.h", "using std::filesystem::exists;\n"),
                     ("llmc/train/a.h", "namespace files = std::filesystem;\n"),
                     ("train_gpt2.cu", "for (auto& a : fs::directory_iterator(path)) f(a);\n"),
                     ("llmc/base/system/files.cpp", "std::error_code e;\nbool a = fs::exists(fs::path(x));\n"),
                     ("llmc/base/system/files.cpp", "std::error_code e;\nfs::directory_iterator i(path);\n")],
                    [("llmc/train/a.cpp", "namespace fs = std::filesystem;\nfs::path a = fs::path(b).parent_path();\n"),
                     ("llmc/train/a.h", "bool f(std::filesystem::path a);   // std::filesystem::exists\n"),
                     ("llmc/base/system/files.cpp", "std::error_code e;\nbool a = fs::exists(f(x, 1), e);\n"
                      "for (fs::directory_iterator i(path, e), end; i != end;) f();\n"),
                     ("tests/base/test_a.cpp", "std::filesystem::exists(a);\n")]),
    "python_package": ([("data/a.py", "import sys\nsys.path.insert(0, '.')\n"),
                        ("data/a.py", "from llmfp8.support import x\n"),
                        ("scripts/a", "#!/usr/bin/env python3\nimport llmfp8.support\n"),
                        ("data/a.py", f"from llmfp8.support import x\n{lint.FIND_PACKAGE}\n"),
                        ("dev/a.py", f"if True:\n    {lint.FIND_PACKAGE} + []\n"),
                        ("scripts/llmfp8/a.py", "from llmfp8.support import x\n")],
                       [("data/a.py", f"import sys\n{lint.FIND_PACKAGE}\nfrom llmfp8.support import x\n"),
                        ("scripts/llmfp8/a.py", "from .support import x\n"), ("scripts/a", "import llmfp8\n"),
                        ("tests/__init__.py", "sys.path[:0] = []\n"), ("data/a.py", "import sys\nprint(sys.path)\n")]),
    "links": ([("README.md", "[x](no/such/file.md)\n"), ("README.md", "[x](#part)\n```\n# part\n```\n"),
               ("README.md", "[x](TROUBLESHOOTING.md#no-such-heading)\n"), ("docs/a.md", "[x](README.md)\n")],
              [("README.md", "[x](Makefile) [y](https://example.org/z) [s](dev/ci/lint.py#L3)\n"),
               ("docs/a.md", "# A part, or `two`\n[x](#a-part-or-two) [y](../TROUBLESHOOTING.md#data)\n")]),
}


class LintRules(unittest.TestCase):
    def test_every_rule_has_cases(self):
        self.assertEqual(sorted(CASES), sorted(rule.__name__ for rule in lint.RULES))

    def test_comment_stripping_keeps_lines(self):
        source = 'a /* x\n y */ b // "z\n"s // t" R"(u\n)" \'"\' 1\'000 c\n'
        stripped = lint.strip_comments(source)
        self.assertEqual(stripped.count("\n"), source.count("\n"))
        self.assertEqual(stripped.split(), ["a", "b", '""', '""', '""', "1'000", "c"])


def add_case(rule):
    def test(self):
        bad, good = CASES[rule.__name__]
        for path, text in bad:
            self.assertTrue(rule(path, text), f"{path}: not caught: {text[:200]!r}")
        for path, text in good:
            self.assertEqual(rule(path, text), [], f"{path}: wrongly reported: {text[:200]!r}")
    setattr(LintRules, f"test_{rule.__name__}", test)


for one in lint.RULES:
    add_case(one)
