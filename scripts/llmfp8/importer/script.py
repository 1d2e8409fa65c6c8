"""Reads a launch script: expands its variables, and finds the settings of its training command and its environment."""
import ast
import operator
import re

from ..support import InputError
from .read_shell import Array, Reader, assignment
from .rows import MOST_DEPTH, MOST_EXPANDED, MOST_SETTINGS, NONE, UNKNOWN, VARIABLE, Finding, Setting
from .shared_rows import COMMANDS

_CONTROL = "if elif while until for case select [ [[ test function"
_STEP = "then else do {"
_BLOCKS = {"if": "fi", "while": "done", "until": "done", "for": "done", "case": "esac"}
_LLMC = re.compile(r"(?:.*/)?train_(gpt2|llama3)(fp32)?(cu)?$")   # its options have one dash
_SUMS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
         ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod}


class Script:
    """Reads a script; `settings` and `launcher` are the options of its training command, `environment` what it
    exports, `findings` the lines that are explained here already."""

    def __init__(self, name, text, given=None):
        self.name, self.lines = name, text.split("\n")
        self.expanded = 0       # characters so far
        self.depth = 0          # of defaults within defaults
        self.values = {}        # variable: [(text, line)], or for an array [word], a word being such a list
        self.arrays = set()
        self.assigned = {}      # variable: lines of its assignments
        self.used = set()
        self.exported = set()
        self.commands = []      # (line, [(word, line)])
        self.settings, self.launcher, self.environment, self.findings = [], [], [], []
        self.blocks = []        # open blocks: the finding about their condition, None once the body matters
        self.given = set(given or {})
        for key, value in (given or {}).items():
            self.values[key] = [(value, 0)]
        reader = Reader(name, text)
        for line, items in reader.statements():
            self.statement(line, items)
        self.broken = reader.broken
        self.choose_command()
        self.explain_variables()

    def note(self, line, action, fact, text=None):
        if len(self.findings) >= MOST_SETTINGS:
            raise InputError(f"{self.name}:{line}: more than {MOST_SETTINGS} lines that are no settings; name a script "
                             "that starts one training")
        shown = text or (self.lines[line - 1].strip() if 0 < line <= len(self.lines) else "")
        self.findings.append(Finding(self.name, line, shown[:78], action, fact))
        return self.findings[-1]

    # ---- expansion ----

    def bounded(self, pieces, line):
        """Returns the pieces, tuples that begin with a text, or fails if variables double each other without end."""
        self.expanded += sum(len(piece[0]) + 1 for piece in pieces)
        if self.expanded > MOST_EXPANDED:
            raise InputError(f"{self.name}:{line}: the script's variables become more than {MOST_EXPANDED} characters; "
                             "name a script that starts one training")
        return pieces

    def segments(self, parts):
        """[(text, line, may be split)] of a word's parts."""
        out = []
        for part in parts:
            if part.kind == "text":
                out.append((part.text, part.line, False))
            elif part.kind == "name":
                found = self.bounded(self.parameter(part.text, part.line), part.line)
                out += [(text, line, not part.quoted) for text, line in found]
            elif part.kind == "sum":
                out.append((self.arithmetic(part.text), part.line, False))
            else:
                out.append((f"$({part.text})", part.line, False))
        return out

    def parameter(self, expression, line):
        """[(text, line)] of ${expression}; an expression without a value is kept as text."""
        match = re.match(r"(\w+|[@*#?!$-])(.*)$", expression, re.S)
        name, rest = match.groups() if match else ("", "")
        self.used.add(name)
        rest = re.sub(r"^\[[@*]\]", "", rest)
        if name in ("@", "*"):
            return []
        known = self.values.get(name)
        if known is not None and not rest:
            return known if name not in self.arrays else [(" ".join(t for t, _ in word), word[0][1]) for word in known]
        default = re.match(r":?[-=](.*)$", rest, re.S)
        if known is not None and default:
            return known
        if default:
            self.depth += 1
            if self.depth > MOST_DEPTH:
                raise InputError(f"{self.name}:{line}: defaults within defaults, more than {MOST_DEPTH} levels deep; "
                                 "give the values themselves")
            reader = Reader(self.name, default.group(1))
            found = [(text, line) for text, _, _ in self.segments(reader.word())] or [("", line)]
            self.depth -= 1
            return found
        return [(f"${{{expression}}}", line)]

    def words(self, item):
        """[(text, line)] that a word of the script becomes."""
        item = [part for part in item if part.kind != "text" or part.text] or item
        if len(item) == 1 and item[0].kind == "name" and re.fullmatch(r"\w+\[[@*]\]", item[0].text):
            name = item[0].text[:item[0].text.index("[")]
            if name in self.arrays:
                self.used.add(name)
                words = self.bounded([word[0] for word in self.values[name]], item[0].line)
                return words if item[0].quoted else [(w, line) for text, line in words for w in text.split()]
        fields, begun = [], False   # fields: (pieces, line)
        for text, line, split in self.segments(item):
            for piece in re.split(r"(\s+)", text) if split else [text]:
                if split and not piece.strip():
                    begun = begun and not piece
                elif begun:
                    fields[-1][0].append(piece)
                else:
                    fields.append(([piece], line))
                    begun = True
                line += piece.count("\n") if split else 0
        return [("".join(pieces), line) for pieces, line in fields]

    def arithmetic(self, text):
        plain = re.sub(r"\$\{?(\w+)\}?|([A-Za-z_]\w*)", lambda m: "".join(
            t for t, _ in self.parameter(m.group(1) or m.group(2), 0)), text)

        def value(node):
            if isinstance(node, ast.Constant) and isinstance(node.value, int):
                return node.value
            if isinstance(node, ast.BinOp) and type(node.op) in _SUMS:
                return _SUMS[type(node.op)](value(node.left), value(node.right))
            raise ValueError
        try:
            return str(value(ast.parse(plain.strip(), mode="eval").body))
        except (ValueError, SyntaxError, ZeroDivisionError, MemoryError, RecursionError):
            return f"$(({text}))"

    # ---- statements ----

    def statement(self, line, items):
        while items and isinstance(items[0], list) and self.plain(items[0]) in _STEP.split():
            items = items[1:]
        if not items:
            return
        first = self.plain(items[0]) if isinstance(items[0], list) else ""
        if first in _CONTROL.split():
            for item in items[1:]:
                if isinstance(item, list):
                    self.words(item)   # its variables are used
            finding = None
            if first == "while" and [self.plain(item) for item in items[1:]] in (["true"], [":"]):
                self.note(line, VARIABLE, "a loop that starts the training again when it ends: --resume auto goes on")
            elif not any(f.line == line and f.action == UNKNOWN for f in self.findings):
                finding = self.note(line, UNKNOWN, "not evaluated: what it decides on is read as if it were so; check "
                                    "the lines that depend on it")
            if first in _BLOCKS:
                self.blocks.append(finding)
            return
        if first in _BLOCKS.values() and self.blocks and (finding := self.blocks.pop()):
            finding.action, finding.fact = VARIABLE, "decides on commands of the shell alone"
        exports = first in ("export", "declare", "local", "readonly", "typeset", "setenv")
        rest = items[1:] if exports else items
        prefix = []
        while rest and (isinstance(rest[0], Array) or assignment(rest[0])):
            prefix.append(rest[0])
            rest = rest[1:]
        if exports and first == "setenv" and len(rest) == 2:
            return self.assign(self.plain(rest[0]), False, rest[1], line, True)
        if prefix:
            self.blocks = [None] * len(self.blocks)
        for item in prefix:
            if isinstance(item, Array):
                self.assign_array(item)
            else:
                self.assign(*assignment(item), line, exports and first == "export" or bool(rest))
        if exports:
            for item in rest:
                self.exported.add(self.plain(item))
        elif rest:
            self.command(line, rest)
        return None

    @staticmethod
    def plain(item):
        return item[0].text if len(item) == 1 and item[0].kind == "text" and not item[0].quoted else ""

    def assign(self, name, append, parts, line, exported):
        before = self.values.get(name, []) if append else []
        self.assigned.setdefault(name, []).append(line)
        if append and name in self.arrays:   # bash appends to the first word
            first = "".join(text for text, _, _ in self.segments(parts))
            words = before or [[("", line)]]
            self.values[name] = [[(words[0][0][0] + first, words[0][0][1])]] + words[1:]
        elif name not in self.given:
            self.values[name] = self.bounded(before + [(text, at) for text, at, _ in self.segments(parts)], line)
            self.arrays.discard(name)
        if exported:
            self.exported.add(name)

    def assign_array(self, array):
        words = [[word] for item in array.words for word in self.words(item)]
        before = self.values.get(array.name, []) if array.append else []
        if before and array.name not in self.arrays:   # a plain value becomes the first word
            before = [[("".join(text for text, _ in before), before[0][1])]]
        self.values[array.name] = before + words
        self.arrays.add(array.name)
        self.assigned.setdefault(array.name, []).append(array.line)

    def command(self, line, items):
        words = [word for item in items if isinstance(item, list) for word in self.words(item)]
        if not words:
            return
        first = words[0][0]
        if first.startswith("--") and self.commands:
            self.note(line, VARIABLE, f"bash takes this line for a separate command: the one of line "
                      f"{self.commands[-1][0]} ended before it (a comment or an end of line without \\ in between); "
                      "read here as it was meant", text="a line that begins with an option")
            self.commands[-1][1].extend(words)
        elif first in COMMANDS.split():
            self.note(line, VARIABLE, "a command of the shell, no part of the training")
        elif any(word.startswith("-") for word, _ in words):
            self.commands.append((line, words))
            self.blocks = [None] * len(self.blocks)
        else:
            self.note(line, UNKNOWN, "neither an assignment nor a command with options")

    # ---- the training command ----

    def choose_command(self):
        for line in self.broken:
            self.note(line, VARIABLE, "this backslash is not the last character of its line, so bash ends the command "
                      "here and the options of the next lines never reach it; read here as it was meant",
                      text="\\ with something behind it")
        ranked = sorted(self.commands, key=lambda c: (-sum(w.startswith("--") for w, _ in c[1]),
                                                           -sum(w.startswith("-") for w, _ in c[1])))
        if ranked:
            chosen = ranked[0]
            words = chosen[1]
            for line, _ in [c for c in self.commands if c is not chosen]:
                self.note(line, UNKNOWN, f"another command than the training of line {chosen[0]}: import one at a time")
        else:   # arguments alone, for a script that sources them
            names = [n for n in self.values if n in self.arrays or any("--" in t for t, _ in self.values[n])]
            self.used.update(names)
            words = [w for n in names for w in self.all_words(n)]
        program = next((i for i, (w, _) in enumerate(words) if _LLMC.match(w)), -1)
        one_dash = program >= 0
        if program < 0:
            program = next((i for i, (w, _) in enumerate(words) if w.endswith(".py") or w == "-m"), -1)
        if program >= 0 and words[program][0] == "-m":
            program += 1
        if program < 0:
            program = next((i - 1 for i, (w, _) in enumerate(words) if w.startswith("-")), -1)
        self.launcher = self.options(words[:max(program, 0)], True)
        self.settings = self.options(words[program + 1:], False, one_dash)

    def all_words(self, name):
        if name in self.arrays:
            return [word[0] for word in self.values[name]]
        fields = []
        for text, line in self.values[name]:
            for piece in re.split(r"(\s+)", text):
                if piece.strip():
                    fields.append((piece, line))
                line += piece.count("\n")
        return fields

    def options(self, words, launcher, one_dash=False):
        """Words as settings; with one_dash the dash stays in the name, as in the table of llm.c. Values are the words
        up to the next option; a negative number is a value."""
        found, current = [], None
        for word, line in words:
            if re.match(r"--?[A-Za-z]", word):
                name, equals, value = (word if one_dash else word.lstrip("-")).partition("=")
                current = [name, [value] if equals else [], line, word.split("=")[0]]
                found.append(current)
            elif word.startswith("$") and current is None or "[@]" in word or "[*]" in word:
                self.note(line, UNKNOWN, f"{word} has no value in this script: name it with --set NAME=VALUE", word)
            elif current is not None:
                current[1].append(word)
            elif not launcher:
                self.note(line, UNKNOWN, "a word that belongs to no option", text=word)
        return [Setting(self.name, line, name, values[0] if len(values) == 1 else values or True,
                        " ".join([shown] + values)[:78]) for name, values, line, shown in found]

    def explain_variables(self):
        for name, lines in self.assigned.items():
            value = "".join(t for t, _ in self.values[name]) if name not in self.arrays else ""
            if name in self.exported:
                self.environment.append(Setting(self.name, lines[-1], name, value, f"{name}={value}"[:78]))
            elif name in self.arrays and name not in self.used:
                self.note(lines[0], NONE, "no command is given these words", text=f"{name}=(...)")
            elif name not in self.arrays and name in self.used:
                shown = f"{name}={value}" if "\n" not in value and "--" not in value else f"{name}=..."
                self.note(lines[-1], VARIABLE, "a variable of the script, put in where it is used", text=shown[:78])
            elif name not in self.arrays:
                self.environment.append(Setting(self.name, lines[-1], "(not exported) " + name, value,
                                                f"{name}={value}"[:78]))
