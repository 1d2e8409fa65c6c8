"""Reads JSON, YAML and TOML: settings with their line numbers."""
import itertools
import json
import re

from ..support import InputError, need
from .rows import MOST_SETTINGS, Setting

# An unterminated string or comment also matches; otherwise each further quotation mark would search for the end again.
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*"?)|//[^\n]*|/\*.*?\*/|(/\*.*)', re.S)
_LAST_COMMA = re.compile(r'("(?:\\.|[^"\\])*"?)|,(?=\s*[}\]])', re.S)


def _setting(name, line, key, value):
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return Setting(name, line, key, value, f"{key} = {text if len(text) <= 70 else text[:67] + '...'}")


def _leaves(value, path=()):
    """(path, value) of an object's leaves; a list is one."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


def _placed(name, text, top, after):
    """Settings for the leaves of an object. A key's line is found by searching on from the key before it; `after` is
    what follows a key."""
    settings, begins, at = [], {(): 0}, 0
    for path, value in itertools.islice(_leaves(top), MOST_SETTINGS + 1):
        for depth in range(1, len(path) + 1):
            if path[:depth] not in begins:
                key = re.compile(rf"(?<![\w-]){re.escape(path[depth - 1])}{after}")
                found = key.search(text, at) or key.search(text, begins[path[:depth - 1]])
                at = begins[path[:depth]] = found.end() if found else at
        settings.append(_setting(name, text.count("\n", 0, begins[path]) + 1, ".".join(path), value))
    return settings


def read_json(name, text):
    """Comments and commas after last entries, which guides print and DeepSpeed's Hjson accepts, are allowed."""
    text = _COMMENT.sub(lambda m: m.group(1) or m.group(2) or re.sub(r"[^\n]", " ", m.group()), text)
    text = _LAST_COMMA.sub(lambda m: m.group(1) or " ", text)

    def once(pairs):
        found = {}
        for key, value in pairs:
            if key in found:
                line = text.count("\n", 0, text.rfind(f'"{key}"')) + 1
                raise InputError(f"{name}:{line}: \"{key}\" is there twice: DeepSpeed refuses that; take one out")
            found[key] = value
        return found
    try:
        top = json.loads(text, object_pairs_hook=once)
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        raise InputError(f"{name}:{line}: not JSON: {getattr(error, 'msg', error)}: "
                         f"{text.split(chr(10))[line - 1].strip()[:200]}; correct that place") from None
    if not isinstance(top, dict):
        raise InputError(f"{name}:1: not a JSON object {{\"key\": value, ...}}")
    return _placed(name, text, top, r'"\s*:')


def read_yaml(name, text):
    """Numbers stay as they are written. Of two equal keys the later one wins, as in PyYAML."""
    yaml = need("yaml", "PyYAML", f"{name}: reading YAML")

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent, index):   # aliases of aliases take memory without end
            if self.check_event(yaml.AliasEvent):
                raise yaml.MarkedYAMLError(problem="an alias (*name) is not followed: write the value out",
                                           problem_mark=self.peek_event().start_mark)
            return super().compose_node(parent, index)

    def value(node):
        if isinstance(node, yaml.MappingNode):
            return {str(value(key)): value(inner) for key, inner in node.value}
        if isinstance(node, yaml.SequenceNode):
            return [value(inner) for inner in node.value]
        kind = node.tag.rpartition(":")[2]
        return node.value.lower() in ("true", "yes", "on") if kind == "bool" else None if kind == "null" else node.value

    def leaves(node, path=""):
        for key, inner in node.value:
            if isinstance(inner, yaml.MappingNode) and inner.value:
                yield from leaves(inner, f"{path}{value(key)}.")
            else:
                yield _setting(name, key.start_mark.line + 1, f"{path}{value(key)}", value(inner))
    try:
        top = yaml.compose(text, Loader=Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = mark.line + 1 if mark else 1
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        at = (text.split("\n") + [""])[line - 1].strip() or "the end of the file"
        raise InputError(f"{name}:{line}: not YAML: {problem}: {at}; correct that place") from None
    if not isinstance(top, yaml.MappingNode):
        raise InputError(f"{name}:1: no mapping of keys to values (key: value)")
    return list(leaves(top))


def read_toml(name, text):
    try:
        import tomllib
    except ImportError:
        raise InputError(f"{name}: reading TOML needs Python 3.11 or newer: run import_config with it") from None
    try:
        top = tomllib.loads(text)
    except ValueError as error:   # TOMLDecodeError, or of a number that has too many digits
        place = re.search(r"line (\d+)", str(error))
        line = int(place.group(1)) if place else text.count("\n") + 1
        raise InputError(f"{name}:{line}: not TOML: {error}; correct that place") from None
    return _placed(name, re.sub(r"(?m)^[ \t]*#.*", "", text), top, r"[\"']?\s*[=.\]]")
