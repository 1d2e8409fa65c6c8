"""Each rule of dev/ci/lint.py must find a violation. That it accepts other text is seen by `make lint`."""
import unittest

import lint

HEADER = "// Math: y = x\n// Source: none\n// Traffic: N\n// Requires: N > 0\n// Parallel: a thread an element\n"
LAUNCH = "k<<<1, 256, f(1, 2), stream>>>(x);\n"
MARK = "TO" + "DO"

# rule name -> [(path, violating text)]
CASES = {
    "launches": [("llmc/model/decoder.cpp", LAUNCH), ("llmc/cuda/a.cu", "k<<<1, 2>>>(x);\n"),
                 ("dev/bench/a.cu", "k<<<dim3(1,\n 2, 3), 2, 0>>>(x);\n")],
    "cuda_symbols": [("llmc/model/decoder.cpp", "cudaFree(p);\n"), ("llmc/model/linear.h", "#include <cublasLt.h>\n"),
                     ("tests/test_a.cpp", "#include <cuda_bf16.h>\n"), ("train_gpt2.cu", "__global__ void k() {}\n")],
    "communication_symbols": [("llmc/model/decoder.cpp", "MPI_Init(0, 0);\n"),
                              ("llmc/parallel/zero.cpp", "ncclComm_t c;\n"),
                              ("llmc/cuda/a.cu", "#include <nccl.h>\n"), ("tests/test_a.cpp", "MPI_Init(0, 0);\n")],
    "includes": [("llmc/base/rng.h", '#include "llmc/config/config.h"\n'),
                 ("llmc/config/config.h", '#include "llmc/ops/device.h"\n'),
                 ("llmc/cpu/a.cpp", '#include "llmc/model/parameters/params.h"\n'),
                 ("llmc/cuda/a.cu", '#include "llmc/parallel/comm/comm.h"\n'),
                 ("llmc/cuda/a.cu", '#include "llmc/cpu/math.h"\n'), ("llmc/nobody.cpp", "int x;\n"),
                 ("llmc/model/linear.cpp", '#include "ops.h"\n'),
                 ("llmc/parallel/comm/comm.h", '#include "llmc/train/trainer.h"\n'),
                 ("llmc/parallel/comm/comm.h", '#include "llmc/parallel/groups.h"\n'),
                 ("llmc/model/parameters/params.h", '#include "llmc/model/linear.h"\n')],
    "one_build": [("llmc/cpu/a.cpp", "device::synchronize(ctx);\n"), ("llmc/cpu/a.h", "#ifdef LLMC_CUDA\n"),
                  ("llmc/cpu/a.cpp", '#include "llmc/ops/owned.h"\n')],
    "inline_assembly": [("llmc/cuda/a.cu", 'asm volatile("x;");\n'), ("llmc/cpu/a.cpp", '__asm__("nop");\n')],
    "kernel_headers": [("llmc/cuda/a.cu", "__global__ void k(int n) {\n}\n"),
                       ("llmc/cuda/a.cu", HEADER.replace("// Traffic: N\n", "") + "__global__ void k() {\n}\n"),
                       ("llmc/cuda/a.cu", HEADER + "\nint x;\n__global__ void k() {\n}\n")],
    "file_length": [("llmc/a.cpp", "\n" * 501), ("train_gpt2.cu", "\n" * 151)],
    "line_width": [("llmc/a.cpp", "x" * 121), ("Makefile", "\n" + "x" * 121)],
    "white_space": [("llmc/a.cpp", "\tint x;\n"), ("llmc/a.cpp", "int x; \nint y;\n"), ("dev/a.py", "x = 1")],
    "machine_paths": [("README.md", "see /ho" + "me/me/x\n"), ("llmc/a.cpp", 'f("/ro' + 'ot/x");\n')],
    "unfinished": [("llmc/a.cpp", f"// {MARK}: later\n"), ("dev/a.py", f"# {MARK}\n")],
    "namespaces": [("llmc/a.cpp", "using namespace std;\n"), ("llmc/a.h", "extern int counter;\n")],
    "fast_math": [("Makefile", "F := -O3 -ffast-math\n"), ("dev/a.mk", "F := --use_fast_math\n"),
                  ("llmc/cpu/a.cpp", '#pragma GCC optimize("Ofast")\n')],
    "json_values": [("Makefile", "DEFINES := -I.\n"),
                    ("llmc/train/a.cpp", '#include <nlohmann/json.hpp>\nbool a = j["type"] == "header";\n'),
                    ("llmc/train/a.cpp", '#include <nlohmann/json.hpp>\nbool a = x != j.at("type");\n')],
    "file_system": [("llmc/data/a.cpp", "if (std::filesystem::exists(path)) f();\n"),
                    ("llmc/train/a.cpp", "namespace fs = std::filesystem;\nauto a = fs::canonical(x, error);\n"),
                    ("llmc/train/a.h", "using std::filesystem::exists;\n"),
                    ("llmc/train/a.h", "namespace files = std::filesystem;\n"),
                    ("train_gpt2.cu", "for (auto& a : fs::directory_iterator(path)) f(a);\n"),
                    ("llmc/base/system/files.cpp", "std::error_code e;\nbool a = fs::exists(fs::path(x));\n"),
                    ("llmc/base/system/files.cpp", "std::error_code e;\nfs::directory_iterator i(path);\n")],
    "python_package": [("data/a.py", "import sys\nsys.path.insert(0, '.')\n"),
                       ("data/a.py", "from llmfp8.support import x\n"),
                       ("scripts/a", "#!/usr/bin/env python3\nimport llmfp8.support\n"),
                       ("data/a.py", f"from llmfp8.support import x\n{lint.FIND_PACKAGE}\n"),
                       ("dev/a.py", f"if True:\n    {lint.FIND_PACKAGE} + []\n"),
                       ("scripts/llmfp8/a.py", "from llmfp8.support import x\n")],
    "links": [("README.md", "[x](no/such/file.md)\n"), ("README.md", "[x](#part)\n```\n# part\n```\n"),
              ("README.md", "[x](TROUBLESHOOTING.md#no-such-heading)\n"), ("docs/a.md", "[x](README.md)\n")],
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
        for path, text in CASES[rule.__name__]:
            self.assertTrue(rule(path, text), f"{path}: not caught: {text[:200]!r}")
    setattr(LintRules, f"test_{rule.__name__}", test)


for one in lint.RULES:
    add_case(one)
