#!/usr/bin/env python3
"""The rules of the code's structure, checked on every file of the repository.

Usage: dev/ci/lint.py [FILE...]     all tracked and new files without arguments
Prints one line a violation and a summary; the exit status is 1 if any rule is broken. Standard library only.
"""
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES, MAX_MAIN_LINES, MAX_COLUMNS = 500, 150, 120
# Files that may be longer, with the reason in a comment.
LONG_FILES = {}

CODE = (".cpp", ".h", ".inl", ".cu", ".cuh")
TEXT = CODE + (".py", ".sh", ".mk", ".md", ".yml")

# What a folder of llmc may include beside itself.
MAY_INCLUDE = {
    "base": "",
    "data": "base",
    "config": "base data",
    "ops": "base",
    "cpu": "base ops",
    "cuda": "base ops",
    "model": "base config ops",
    "fault": "base",
    "parallel": "base config ops model fault",
    "checkpoint": "base data config model parallel",
    "train": "base data config ops model fault parallel checkpoint",
    "perf": "base config ops model train",
    "commands": "base data config ops model fault parallel checkpoint train perf",
}

# What a folder with subfolders, or one of these, may include of the others. Where two may include each other, the
# subfolder only groups files.
MAY_INCLUDE_WITHIN = {
    "base": "base/system",
    "base/system": "base",
    "checkpoint": "checkpoint/huggingface",
    "checkpoint/huggingface": "checkpoint",
    "commands": "commands/bench commands/doctor",
    "commands/bench": "commands",
    "commands/doctor": "commands",
    "config": "config/foreign",
    "model": "model/parameters",
    "model/parameters": "",
    "parallel": "parallel/comm",
    "parallel/comm": "",
    "parallel/zero": "parallel parallel/comm",
    "train": "train/log train/run",
    "train/log": "train",
    "train/run": "train train/log",
}

ASSEMBLY_FILES = ("llmc/cuda/ptx.cuh",)
CUDA_FILES = r"llmc/cuda/|dev/bench/|tests/gpu/gpu_test_fast_paths\.cpp$"
COMM_FILES = r"llmc/parallel/comm/comm_\w+\.(cpp|h)$|tests/(end_to_end/fake|gpu/gpu_test)_nccl\w*\.cpp$"
# The line with which a script in any folder finds scripts/llmfp8.
FIND_PACKAGE = ('sys.path[:0] = [str(p / "scripts") for p in Path(__file__).resolve().parents '
                'if (p / "scripts/llmfp8").is_dir()]')
# The names are split, so that this file does not violate its own rule.
MACHINE_PATHS = re.compile("/(?:wo" "rk|ro" "ot|ho" "me|opt/hf" "env|mnt)/")


def strip_comments(text, strings=True):
    """C++ source with comments (and the insides of strings) blanked; line numbers stay."""
    token = re.compile(r'//[^\n]*|/\*.*?\*/|R"([^(\s]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\'',
                       re.S)

    def blank(match):
        part = match.group()
        if part.startswith(("//", "/*")):
            return re.sub(r"[^\n]", " ", part)
        return '""' + "\n" * part.count("\n") if strings else part
    return token.sub(blank, text)


def line_of(text, position):
    return text.count("\n", 0, position) + 1


def matches(pattern, text, message):
    return [(line_of(text, m.start()), message % {"found": m.group().strip()}) for m in re.finditer(pattern, text)]


def split_arguments(text):
    """Top-level comma-separated parts."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([{<") - (c in ")]}>")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts


def is_code(path):
    return path.endswith(CODE)


# ---- rules: each takes (path, text) and returns [(line, message)]; its first docstring line is its name


def launches(path, text):
    """launch: <<< only in llmc/cuda and dev/bench, always with a stream"""
    if not is_code(path):
        return []
    code, out = strip_comments(text), []
    for m in re.finditer(r"<<<(.*?)>>>", code, re.S):
        if not re.match(r"llmc/cuda/|dev/bench/", path):
            out.append((line_of(code, m.start()), "kernel launch outside llmc/cuda and dev/bench"))
        elif len(split_arguments(m.group(1))) != 4:
            out.append((line_of(code, m.start()), "launch without a stream: <<<grid, block, shared bytes, stream>>>"))
    return out


def cuda_symbols(path, text):
    """cuda symbols: CUDA and cuBLAS only in llmc/cuda, dev/bench and the test that captures launches"""
    if not is_code(path) or re.match(CUDA_FILES, path):
        return []
    code = strip_comments(text, strings=False)
    return matches(r"#include\s*[<\"](?:cu(?:da|blas|pti|rand)|nv)\w*[./][^>\"]*[>\"]", code, "%(found)s here") + \
        matches(r"\b(?:cuda[A-Z]\w*|cublas[A-Z]\w*|__global__|__shared__|threadIdx|blockIdx)\b", strip_comments(text),
                "CUDA symbol %(found)s here")


def communication_symbols(path, text):
    """communication: NCCL and MPI only in comm_* files, and in tests of NCCL"""
    if not is_code(path) or re.match(COMM_FILES, path):
        return []
    return matches(r"\b(?:nccl[A-Z]\w*|MPI_\w+)\b|#include\s*<(?:nccl|mpi)\.h>", strip_comments(text),
                   "%(found)s outside llmc/comm_*")


def includes(path, text):
    """includes: a folder of llmc includes what MAY_INCLUDE and MAY_INCLUDE_WITHIN list for it; tests/support/doctest.h
    is the way to doctest, whose macros and ours have the same names"""
    if path.startswith("tests/") and not path.startswith("tests/support/"):
        return matches(r"#include <doctest/", text, "include tests/support/doctest.h")
    if not (path.startswith("llmc/") and is_code(path)):
        return []
    own, out = path.split("/")[1], []
    if own not in MAY_INCLUDE:
        return [(1, "lies in no folder of MAY_INCLUDE in dev/ci/lint.py")]
    for m in re.finditer(r'#include\s*"([^"]+)"', strip_comments(text, strings=False)):
        name, line = m.group(1), line_of(text, m.start())
        folder = name.split("/")[1] if re.match(r"llmc/\w+/", name) else None
        if not folder:
            out.append((line, f'include "{name}" by its path from the root, llmc/FOLDER/...'))
        elif folder not in [own, *MAY_INCLUDE[own].split()]:
            out.append((line, f"{own}/ includes {name}"))
        elif folder == own:
            mine, theirs = (file.removeprefix("llmc/").rpartition("/")[0] for file in (path, name))
            if theirs not in [mine, *MAY_INCLUDE_WITHIN.get(mine, "").split()]:
                out.append((line, f"{mine}/ includes {name}"))
    return out


def one_build(path, text):
    """one build: llmc/cpu, but for stream.cpp, is compiled once for both devices and depends on neither"""
    if not (path.startswith("llmc/cpu/") and is_code(path)) or path == "llmc/cpu/stream.cpp":
        return []
    return matches(r'\bdevice::|\bLLMC_CUDA\b|"llmc/ops/(?:owned|op_timer)\.h"', strip_comments(text, strings=False),
                   "%(found)s differs between devices")


def inline_assembly(path, text):
    """assembly: inline asm only in llmc/cuda/ptx.cuh, and in that of the candidates"""
    if not is_code(path) or path in ASSEMBLY_FILES:
        return []
    return matches(r"\b(?:__asm__|asm)\b(?:\s+volatile)?\s*\(", strip_comments(text), "inline assembly here")


def kernel_headers(path, text):
    """kernel headers: every __global__ function in llmc/cuda says Math, Source, Traffic, Requires, Parallel"""
    if not (path.startswith("llmc/cuda/") and is_code(path)):
        return []
    out, lines = [], text.split("\n")
    code = strip_comments(text)
    for m in re.finditer(r"__global__[^;{]*\{", code):
        line = line_of(code, m.start())
        above = line - 2
        # Constants, template and launch-bound lines may stand between the comment and the function.
        between = r"\s*(constexpr\b|template\b|__launch_bounds__|typename\b|.*>\s*$)"
        while above >= 0 and re.match(between, lines[above]) and not lines[above].lstrip().startswith("//"):
            above -= 1
        comment = []
        while above >= 0 and lines[above].lstrip().startswith("//"):
            comment.append(lines[above])
            above -= 1
        for word in ("Math", "Source", "Traffic", "Requires", "Parallel"):
            if not any(re.match(rf"\s*//\s*{word}:", c) for c in comment):
                out.append((line, f"kernel without a line '// {word}: ...' in the comment above it"))
    return out


def file_length(path, text):
    """length: at most 500 lines a file, 150 a main"""
    if not path.endswith(tuple(t for t in TEXT if t != ".md")):
        return []
    limit = LONG_FILES.get(path, MAX_MAIN_LINES if re.match(r"train_\w+\.cu$", path) else MAX_LINES)
    count = text.count("\n")
    return [(count, f"{count} lines, at most {limit}")] if count > limit else []


def line_width(path, text):
    """width: at most 120 columns in code"""
    if not path.endswith(CODE + (".py", ".sh", ".mk")) and os.path.basename(path) != "Makefile":
        return []
    return [(i, f"{len(line)} columns, at most {MAX_COLUMNS}") for i, line in enumerate(text.split("\n"), 1)
            if len(line) > MAX_COLUMNS]


def white_space(path, text):
    """white space: no tabs (Makefile recipes aside), no spaces at the end of a line, a newline at the end"""
    if not path.endswith(CODE + (".py", ".sh")):
        return []
    out = matches(r"\t", text, "tab") + matches(r"[ \t]+(?=\n)", text, "spaces at the end of the line")
    if text and not text.endswith("\n"):
        out.append((line_of(text, len(text)), "no newline at the end of the file"))
    return out


def machine_paths(path, text):
    """paths: no folder of somebody's machine"""
    return [(line_of(text, m.start()), f"path of one machine: {m.group()}") for m in MACHINE_PATHS.finditer(text)]


def unfinished(path, text):
    """unfinished: no markers of work left over"""
    if not path.endswith(TEXT):
        return []
    return matches(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b", text, "%(found)s")


def namespaces(path, text):
    """namespaces: no using namespace std, no global mutable state behind extern"""
    if not is_code(path):
        return []
    code = strip_comments(text)
    return matches(r"\busing\s+namespace\s+std\b", code, "%(found)s") + \
        matches(r"(?m)^\s*extern\s+(?!\"\"|const\b|template\b|__shared__)[^(\n]*;", code, "mutable global: %(found)s")


def fast_math(path, text):
    """exactness: no option or pragma that lets the compiler change arithmetic"""
    if path == "dev/ci/lint.py" or not (path.endswith(CODE + (".mk",)) or os.path.basename(path) == "Makefile"):
        return []
    code = strip_comments(text, strings=False) if is_code(path) else re.sub(r"#[^\n]*", "", text)
    return matches(r"-ffast-math|-Ofast|--?use_fast_math|-ffp-contract=fast|#pragma GCC optimize|reassociate\(on\)",
                   code, "%(found)s")


def json_values(path, text):
    """json: values leave a json through get<T>(), never by comparison or conversion"""
    if path == "Makefile" and "-DJSON_USE_IMPLICIT_CONVERSIONS=0" not in text:
        return [(1, "without -DJSON_USE_IMPLICIT_CONVERSIONS=0 a json converts to anything")]
    if not (path.startswith("llmc/") and is_code(path) and "nlohmann/json" in text):
        return []
    element = r'(?:\["\w+"\]|\.at\("\w+"\)|\bJson\([^()]*\))'
    return matches(rf"{element}\s*[=!]=|[=!]=\s*\w+{element}(?!\.)|[=!]=\s*Json\(",
                   strip_comments(text, strings=False), "comparison with a json: %(found)s")


def file_system(path, text):
    """file system: std::filesystem reaches the disk only in llmc/base/system/files.cpp, always with an error_code"""
    if not (re.match(r"llmc/|train_", path) and is_code(path)):
        return []
    code = strip_comments(text)
    if path != "llmc/base/system/files.cpp":
        # fs::path is only text.
        return matches(r"\bfs::(?!path\b)\w+|(?<!namespace fs = )\bstd::filesystem\b(?!::path\b)(?:::\w+)?", code,
                       "%(found)s here: a function of llmc/base/system/files.h does not throw")
    out, known = [], re.findall(r"\bstd::error_code\s+(\w+)", code)
    for m in re.finditer(r"\b(?:fs|std::filesystem)::(?!path\b)(\w+)\s*(?:\w+\s*)?\(", code):
        end, depth = m.end(), 1
        while depth and end < len(code):
            depth += (code[end] == "(") - (code[end] == ")")
            end += 1
        if split_arguments(code[m.end():end - 1])[-1].strip() not in known:
            out.append((line_of(code, m.start()), f"{m.group(1)} without an error_code throws"))
    return out


def python_package(path, text):
    """package: what uses scripts/llmfp8 finds it by one line, the same everywhere; nothing else changes sys.path"""
    is_python = path.endswith(".py") or text.startswith("#!/usr/bin/env python3\n")
    if not is_python or path.startswith("tests/"):
        return []
    out = [(line_of(text, m.start(1)), f"a change of sys.path that is not: {FIND_PACKAGE}")
           for m in re.finditer(r"(?m)^[ \t]*((?:sys\.path\b|site\.addsitedir).*)$", text)
           if m.group(1) != FIND_PACKAGE]
    uses = re.search(r"(?m)^[ \t]*(?:from|import) llmfp8\b", text)
    if uses and path.startswith("scripts/llmfp8/"):
        out.append((line_of(text, uses.start()), "files of the package import each other by relative names"))
    elif uses and f"\n{FIND_PACKAGE}\n" not in text[:uses.start()]:
        out.append((line_of(text, uses.start()), f"llmfp8 is imported without this line before: {FIND_PACKAGE}"))
    return out


def anchors(text):
    """The anchors (#name) of a Markdown text: its headings as GitHub converts them."""
    headings = re.findall(r"(?m)^#+ +(.*?) *$", re.sub(r"(?ms)^ *```.*?^ *```$", "", text))
    return {re.sub(r"[^\w -]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", h)).lower().replace(" ", "-") for h in headings}


def links(path, text):
    """links: relative links of Markdown files lead to a file, and to one of its headings"""
    if not path.endswith(".md"):
        return []
    out = []
    for m in re.finditer(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?[^)]*\)", text):
        name, anchor = m.groups()
        target = (ROOT / path).parent.joinpath(name)
        if name and not target.exists():
            out.append((line_of(text, m.start()), f"link to {name}, which does not exist"))
        elif anchor and (not name or name.endswith(".md")) \
                and anchor not in anchors(target.read_text(encoding="utf-8") if name else text):
            out.append((line_of(text, m.start()), f"link to #{anchor}, which is no heading there"))
    return out


RULES = [launches, cuda_symbols, communication_symbols, includes, one_build, inline_assembly, kernel_headers,
         file_length, line_width, white_space, machine_paths, unfinished, namespaces, fast_math,
         json_values, file_system, python_package, links]


def repository_files():
    """Tracked and new files, or without git everything but build outputs."""
    git = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True,
                         capture_output=True)
    if git.returncode == 0:
        return [f for f in git.stdout.split("\n") if f and (ROOT / f).is_file()]
    skip = {"build", ".git", "runs", "__pycache__"}
    return [str(p.relative_to(ROOT)) for p in sorted(ROOT.rglob("*"))
            if p.is_file() and not skip & set(p.relative_to(ROOT).parts)]


def check(path, text):
    """[(rule, line, message)] of one file."""
    return [(rule, line, message) for rule in RULES for line, message in rule(path, text)]


def main(arguments):
    files = [str(Path(a).resolve().relative_to(ROOT)) for a in arguments] or repository_files()
    broken = set()
    for path in files:
        data = (ROOT / path).read_bytes()
        if b"\0" in data or len(data) > 4 << 20:
            continue
        for rule, line, message in check(path, data.decode("utf-8", "replace")):
            broken.add(rule)
            print(f"{path}:{line}: {rule.__doc__.split(':')[0]}: {message}")
    print(f"lint: {len(files)} files, {len(RULES) - len(broken)} rules passed, {len(broken)} failed")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
