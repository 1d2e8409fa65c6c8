"""Reads JSON, YAML, TOML and lines NAME = value as settings with their line numbers. Nothing of them is run."""
import ast
import json
import math
import re

from ..support import InputError, need, one_line
from .rows import MOST_DEPTH, MOST_EXPANDED, UNKNOWN, VARIABLE, Finding, Setting

# An unterminated string or comment also matches; otherwise each further quotation mark would search for the end again.
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*"?)|//[^\n]*|/\*.*?\*/|(/\*.*)', re.S)
_LAST_COMMA = re.compile(r'("(?:\\.|[^"\\])*"?)|,(?=\s*[}\]])', re.S)


def shown(key, value):
    """How the report shows a key of a file."""
    text = json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, str) else value
    return f"{key} = {text if len(text) <= 70 else text[:67] + '...'}"


def _leaves(name, value, path="", depth=0):
    """(dotted path, value) of an object's leaves; a list is one."""
    if depth > MOST_DEPTH:
        raise InputError(f"{name}:1: nested more than {MOST_DEPTH} levels deep, which no configuration is")
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(name, inner, f"{path}.{key}" if path else key, depth + 1)
    else:
        yield path, value


def read_json(name, text):
    """Leaves of the object by dotted path; a list of plain values is one leaf. Comments and commas after last entries,
    which guides print and DeepSpeed's Hjson accepts, are allowed."""
    plain = _COMMENT.sub(lambda m: m.group(1) or m.group(2) or re.sub(r"[^\n]", " ", m.group()), text)
    plain = _LAST_COMMA.sub(lambda m: m.group(1) or " ", plain)

    def once(pairs):
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            key = next(key for key in found if keys.count(key) > 1)
            named = re.finditer(rf'"{re.escape(key)}"\s*:', plain)
            places = [1, 1] + [plain.count("\n", 0, match.start()) + 1 for match in named]
            raise InputError(f"{name}:{places[-1]}: \"{key}\" is there twice (first in line {places[-2]}): DeepSpeed "
                             "refuses that; take one out")
        return found
    try:
        top = json.loads(plain, object_pairs_hook=once)
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        raise InputError(f"{name}:{line}: not JSON: {getattr(error, 'msg', error)}: "
                         f"{text.split(chr(10))[line - 1].strip()[:200]}; correct that place") from None
    if not isinstance(top, dict):
        raise InputError(f"{name}:1: not a JSON object {{\"key\": value, ...}}")
    settings, at, before = [], 0, []
    for path, value in _leaves(name, top):   # in the order of the file
        keys = path.split(".")
        same = next((i for i, (a, b) in enumerate(zip(keys, before)) if a != b), min(len(keys), len(before)))
        for key in keys[same:]:
            found = re.compile(rf'"{re.escape(key)}"\s*:').search(plain, at)
            at = found.end() if found else at
        before = keys
        settings.append(Setting(name, plain.count("\n", 0, at) + 1, path, value, shown(path, value)))
    return settings


def read_yaml(name, text):
    """The same for a YAML file; of two equal keys the later one wins, as in PyYAML."""
    yaml = need("yaml", "PyYAML", f"{name}: reading YAML")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None or not isinstance(node, yaml.MappingNode):
            raise InputError(f"{name}:1: no mapping of keys to values (key: value)")
        loader = yaml.SafeLoader("")
        settings, sizes = [], {}

        def size(node, depth):
            """Entries of a node once its aliases are followed."""
            line = node.start_mark.line + 1
            if sizes.setdefault(id(node), None) is None:
                if depth > MOST_DEPTH:
                    raise InputError(f"{name}:{line}: nested more than {MOST_DEPTH} levels deep, or an alias that "
                                     "contains itself; write the values out")
                parts = [] if isinstance(node, yaml.ScalarNode) else node.value
                parts = [part for pair in parts for part in (pair if isinstance(pair, tuple) else (pair,))]
                sizes[id(node)] = 1 + sum(size(part, depth + 1) for part in parts)
            if sizes[id(node)] > MOST_EXPANDED // 64:
                raise InputError(f"{name}:{line}: has more than {MOST_EXPANDED // 64} entries once its aliases are "
                                 "followed; write a smaller file")
            return sizes[id(node)]

        def walk(mapping, path):
            for key_node, value_node in mapping.value:
                line = key_node.start_mark.line + 1
                if not isinstance(key_node, yaml.ScalarNode):
                    raise InputError(f"{name}:{line}: a key that is no plain word; correct that place")
                key = f"{path}.{key_node.value}" if path else str(key_node.value)
                if isinstance(value_node, yaml.MappingNode) and value_node.value:
                    walk(value_node, path if key_node.value == "<<" else key)
                    continue
                try:
                    value = loader.construct_object(value_node, deep=True)
                except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
                    # PyYAML's own for values like 2024-99-99 or !!int x.
                    raise InputError(f"{name}:{line}: {key}: no value of its type ({one_line(error)}); correct that "
                                     "place") from None
                settings.append(Setting(name, line, key, value, shown(key, value)))
        size(node, 0)
        walk(node, "")
        return settings
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = mark.line + 1 if mark else 1
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        at = (text.split("\n") + [""])[line - 1].strip() or "the end of the file"
        raise InputError(f"{name}:{line}: not YAML: {problem}: {at}; correct that place") from None


def read_toml(name, text):
    """The same for a TOML file."""
    try:
        import tomllib
    except ImportError:
        raise InputError(f"{name}: reading TOML needs Python 3.11 or newer: run import_config with it") from None
    # From a key with n dots the library makes n keys of up to n parts.
    dots = re.search(r"(?<![\w-])(?:(?:[\w-]++|\"[^\"\n]*+\"|'[^'\n]*+')[ \t]*+\.[ \t]*+){%d}" % MOST_DEPTH, text)
    if dots:
        line = text.count("\n", 0, dots.start()) + 1
        raise InputError(f"{name}:{line}: a key of more than {MOST_DEPTH} parts, which no configuration has")
    try:
        top = tomllib.loads(text)
    except ValueError as error:   # TOMLDecodeError, or of a number that has too many digits
        place = re.search(r"line (\d+)", str(error))
        line = int(place.group(1)) if place else text.count("\n") + 1
        raise InputError(f"{name}:{line}: not TOML: {error}; correct that place") from None
    lines, section = {}, ""
    for number, line in enumerate(text.split("\n"), 1):
        head, key = re.match(r"\s*\[([^\[\]]+)\]", line), re.match(r"\s*([\w.\"'-]+)\s*=", line)
        if head:
            section = re.sub(r"[\s\"']", "", head.group(1)) + "."
        elif key:
            lines.setdefault(section + re.sub(r"[\"']", "", key.group(1)), number)

    def line_of(path):
        while path and path not in lines:   # in an inline table: the line of the table
            path = path.rpartition(".")[0]
        return lines.get(path, 1)
    return [Setting(name, line_of(path), path, value, shown(path, value)) for path, value in _leaves(name, top)]


def read_lines(name, text, given):
    """(settings, findings): lines NAME = value at the beginning of a line, a value being a constant of Python or a
    product of whole numbers; `given` overrides them. Any other value is kept as text, after a $."""
    settings, findings = [], []
    for number, line in enumerate(re.sub(r"\r\n?", "\n", text).split("\n"), 1):
        code = line.strip()
        match = re.match(r"([A-Za-z_]\w*)\s*=(?!=)\s*(.+)", line)
        if match:
            key, source = match[1], re.sub(r"\s+#[^'\"]*$", "", match[2]).strip()
            try:
                if key in given:
                    value = given[key]
                elif re.fullmatch(r"\d{1,9}(?:\s*\*\s*\d{1,9}){1,4}", source):
                    value = math.prod(map(int, re.findall(r"\d+", source)))
                else:
                    value = ast.literal_eval(source[:4096])
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                value = f"$({source})"
            settings.append(Setting(name, number, key, value, shown(key, value).replace("$(", "(")))
        elif code and code[0] not in "#'\"":
            action = VARIABLE if code.startswith(("import ", "from ")) else UNKNOWN
            findings.append(Finding(name, number, code[:78], action, "not run: only lines NAME = value are read"))
    return settings, findings
