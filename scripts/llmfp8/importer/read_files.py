"""Reads JSON, YAML, TOML and Python files as settings with their line numbers. Nothing of them is run."""
import ast
import json
import operator
import re

from ..support import InputError, need, one_line, parse_json
from .rows import MOST_DEPTH, MOST_EXPANDED, Setting

_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\]:,]|[^\s{}\[\]:,"]+|\n|[ \t\r]+')
# An unterminated string or comment also matches; otherwise each further quotation mark would search for the end again.
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*"?)|//[^\n]*|/\*.*?\*/|(/\*.*)', re.S)
_LAST_COMMA = re.compile(r'("(?:\\.|[^"\\])*"?)|,(?=\s*[}\]])', re.S)


def shown(key, value):
    """How the report shows a key of a file."""
    text = json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, str) else value
    return f"{key} = {text if len(text) <= 70 else text[:67] + '...'}"


def read_json(name, text):
    """Leaves of the object by dotted path; a list of plain values is one leaf."""
    # Removes comments and commas after last entries, which guides print and DeepSpeed's Hjson accepts, and keeps line
    # numbers.
    plain = _COMMENT.sub(lambda m: m.group(1) or m.group(2) or re.sub(r"[^\n]", " ", m.group()), text)
    plain = _LAST_COMMA.sub(lambda m: m.group(1) or " ", plain)
    try:
        top = parse_json(plain)
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        raise InputError(f"{name}:{line}: not JSON: {getattr(error, 'msg', error)}: "
                         f"{text.split(chr(10))[line - 1].strip()[:200]}; correct that place") from None
    if not isinstance(top, dict):
        raise InputError(f"{name}:1: not a JSON object {{\"key\": value, ...}}")
    leaves = list(_leaves(name, top, ""))
    lines = _key_lines(name, plain)
    return [Setting(name, lines.get(path, 1), path, value, shown(path, value)) for path, value in leaves]


def _leaves(name, value, path, depth=0):
    if depth > MOST_DEPTH:
        raise InputError(f"{name}:1: nested more than {MOST_DEPTH} levels deep, which no configuration is")
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(name, inner, f"{path}.{key}" if path else key, depth + 1)
    else:
        yield path, value


def _key_lines(name, text):
    """{dotted path: line} of each key; the text is valid JSON."""
    lines, line, stack, key, word = {}, 1, [], "", None
    for token in _TOKEN.findall(text):
        if token == "\n":
            line += 1
        elif token == "{" or token == "[":
            in_list = bool(stack) and stack[-1] is None
            stack.append(key if token == "{" and not in_list else None)
            word = None
        elif token in "}]":
            stack.pop()
            key = ""
        elif token == ":" and word is not None and stack[-1] is not None:
            key = ".".join(part for part in (stack[-1], word) if part)
            if key in lines:
                raise InputError(f"{name}:{line}: \"{word}\" is there twice (first in line {lines[key]}): DeepSpeed "
                                 "refuses that; take one out")
            lines[key] = line
        elif token[0] == '"':
            word = parse_json(token)
    return lines


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
                if not isinstance(key_node, yaml.ScalarNode):
                    raise InputError(f"{name}:{key_node.start_mark.line + 1}: a key that is no plain word; correct "
                                     "that place")
                key = f"{path}.{key_node.value}" if path else str(key_node.value)
                if isinstance(value_node, yaml.MappingNode) and value_node.value:
                    walk(value_node, path if key_node.value == "<<" else key)
                    continue
                try:
                    value = loader.construct_object(value_node, deep=True)
                except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
                    # PyYAML's own for values like 2024-99-99 or !!int x.
                    raise InputError(f"{name}:{key_node.start_mark.line + 1}: {key}: no value of its type "
                                     f"({one_line(error)}); correct that place") from None
                settings.append(Setting(name, key_node.start_mark.line + 1, key, value, shown(key, value)))
        size(node, 0)
        walk(node, "")
        return settings
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = mark.line + 1 if mark else 1
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        lines = text.split("\n")
        at = lines[line - 1].strip() if line <= len(lines) else "the end of the file"
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
    return [Setting(name, line_of(path), path, value, shown(path, value)) for path, value in _leaves(name, top, "")]


_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
               ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod}


def read_python(name, text, given):
    """Assignments of plain values at the top level of a Python file, with arithmetic on them; `given` overrides them.
    Other expressions are kept as text, after a $."""
    text = re.sub(r"\r\n?", "\n", text)   # Python's lines
    try:
        body = ast.parse(text).body
    except MemoryError:   # its parser's stack
        raise RecursionError from None
    except (SyntaxError, ValueError) as error:
        raise InputError(f"{name}:{getattr(error, 'lineno', None) or 1}: not Python: {getattr(error, 'msg', error)}; "
                         "correct that place") from None
    known, settings, other, lines = dict(given), [], [], text.split("\n")

    def source(node):   # ast.get_source_segment cuts the whole text into lines at each call
        found = [line.encode() for line in lines[node.lineno - 1:node.end_lineno]]
        found[-1] = found[-1][:node.end_col_offset]
        found[0] = found[0][node.col_offset:]
        return b"\n".join(found).decode()

    def value(node):
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id in known:
            return known[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            left, right = value(node.left), value(node.right)
            if isinstance(left, (int, float)) and isinstance(right, (int, float)):
                found = _OPERATIONS[type(node.op)](left, right)
                if abs(found) >= 2 ** 63:   # doubled digits in every line would take all memory
                    raise ValueError
                return float(f"{found:.12g}") if isinstance(found, float) else found
        raise ValueError
    for node in body:
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        if isinstance(target, ast.Name):
            try:
                known[target.id] = found = known[target.id] if target.id in given else value(node.value)
            except (ValueError, TypeError, ArithmeticError):
                known.pop(target.id, None)
                found = f"$({' '.join(source(node.value).split())})"
            settings.append(Setting(name, node.lineno, target.id, found, shown(target.id, found).replace("$(", "(")))
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            other.append((node.lineno, lines[node.lineno - 1].strip()[:78]))
    return settings, other
