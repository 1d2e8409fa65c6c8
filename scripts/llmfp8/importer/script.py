"""Reads a launch script: the words of its training command, which become settings, and its environment. Nothing is run:
plain NAME=value, arrays and ${NAME:-default} are put in where a command uses them. Any other expansion has no value
here, and the report asks for it."""
import re

from ..support import InputError
from .rows import MOST_EXPANDED, MOST_SETTINGS, NONE, UNKNOWN, VARIABLE, Setting, Finding
from .shared_rows import COMMANDS

_TOKEN = re.compile(r"""
    (?P<skip>[ \t\r]+|(?P<broken>\\[ \t]*(?:\#[^\n]*)?(?:\n|\Z))|\#[^\n]*|\d?[<>]+&?[ \t]*[^\s;&|<>]*)
    |(?P<end>\n|[;&|]+|(?<!\S)[{}](?!\S))|(?P<array>(?P<name>[A-Za-z_]\w*)(?P<append>\+?)=\()|(?P<bracket>[()])
    |(?P<word>(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|\$\(\([^()]*\)\)|\$\([^()]*\)|`[^`]*`|\$\{[^{}]*\}|[^\s;&|()<>\\'"`])+)
    """, re.X | re.S)
_HERE = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1[^\n]*\n(?:[^\n]*\n)*?[ \t]*\2[ \t]*(?=\n|\Z)")
_QUOTED = re.compile(r"\\(.)|'([^']*)'|\"((?:\\.|[^\"\\])*)\"", re.S)
_REFERENCE = re.compile(r"\$\{(\w+|[@*])(?:\[[@*]\])?(?::?[-=]([^{}]*))?\}|\$(\w+|[@*])")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.S)
_EXPORTS = ("export", "declare", "local", "readonly", "typeset")
_BLOCKS = {"if": "fi", "while": "done", "until": "done", "for": "done", "case": "esac"}
_LLMC = re.compile(r"(?:.*/)?train_(gpt2|llama3)(fp32)?(cu)?$")   # its options have one dash


def unquoted(raw):
    def content(match):
        if match[3] is None:
            return (match[1] or "").strip("\n") or match[2] or ""
        return re.sub(r'\\([\\"$`\n])', r"\1", match[3])   # a continued line stays a line break, to count lines
    return _QUOTED.sub(content, raw)


class Script:
    """`settings` and `launcher` are the options of the training command, `environment` what is exported, `findings` the
    lines that are explained here already."""

    def __init__(self, name, text, given=None):
        self.name, self.given = name, dict(given or {})
        self.values = {key: [(value, 0)] for key, value in self.given.items()}   # variable: [(word, line)]
        self.arrays, self.used, self.exported = set(), set(), set()
        self.assigned = {}      # variable: line of its last assignment
        self.expanded = 0       # characters that variables became so far
        self.commands = []      # (line, [(word, line)])
        self.blocks = []        # findings about the conditions that are open
        self.settings, self.launcher, self.environment, self.findings = [], [], [], []
        text = text.replace("\r\n", "\n")
        self.lines = text.split("\n")
        self.read(_HERE.sub(lambda match: re.sub(r"[^\n]", "", match.group()), text))
        self.choose_command()
        self.read_environment()

    def fail(self, line, problem):
        raise InputError(f"{self.name}:{line}: {problem}")

    def note(self, line, action, fact, text=None):
        if len(self.findings) >= MOST_SETTINGS:
            self.fail(line, f"more than {MOST_SETTINGS} lines that are no settings; name a script that starts one "
                      "training")
        self.findings.append(Finding(self.name, line, (text or self.lines[line - 1].strip())[:78], action, fact))
        return self.findings[-1]

    def count(self, words, line):
        """Fails if variables double each other without end."""
        self.expanded += sum(len(word) + 1 for word, _ in words)
        if self.expanded > MOST_EXPANDED:
            self.fail(line, f"the script's variables become more than {MOST_EXPANDED} characters; name a script that "
                      "starts one training")

    # ---- words and their expansion ----

    def read(self, text):
        """Cuts the text into statements: a word is (raw text, line), an array (name, append, words)."""
        at, line, items, array = 0, 1, [], None
        while at < len(text):
            match = _TOKEN.match(text, at)
            if not match:
                self.fail(line, f"{text[at]} is never closed; close it")
            at = match.end()
            if match["broken"] and match["broken"] not in ("\\\n", "\\"):
                self.note(line, VARIABLE, "this backslash is not the last character of its line, so bash ends the "
                          "command here and the options of the next lines never reach it; read here as it was meant",
                          text="\\ with something behind it")
            if match["word"]:
                (items if array is None else array[2]).append((match["word"], line))
            elif match["array"]:
                array, begin = (match["name"], match["append"], []), line
                items.append(array)
            elif match["bracket"] == ")":
                array = None
            elif match["end"] and array is None:
                self.statement(items)
                items = []
            line += match.group().count("\n")
        if array is not None:
            self.fail(begin, f"array {array[0]}=( has no closing bracket; add the ) that ends it")
        self.statement(items)

    def text(self, raw, line):
        """A word with the values of its variables, without quotes; what has no value stays as it is."""
        def value(match):
            name = match[1] or match[3]
            self.used.add(name)
            if name in self.values:
                return " ".join(word for word, _ in self.values[name])
            return match.group() if match[2] is None and name not in "@*" else match[2] or ""
        word = raw
        for _ in range(8):   # defaults within defaults
            word, before = _REFERENCE.sub(value, word), word
            if word == before:
                break
            self.count([(word, line)], line)
        return unquoted(word)

    def words(self, raw, line):
        """[(word, line)]: the words of a variable if that is all there is, else one word. Only a word that begins with
        a dash is cut at its blanks, since options were meant."""
        match = _REFERENCE.fullmatch(raw.strip('"'))
        name = match and (match[1] or match[3])
        if name in self.values:
            self.used.add(name)
            found = self.values[name]
        elif name in ("@", "*"):
            found = []
        else:
            found = [(self.text(raw, line), line)]
        return [(piece, at) for word, at in found for piece in (word.split() if word[:1] == "-" else [word])]

    # ---- statements ----

    def statement(self, items):
        while items and items[0][0] in ("then", "else", "do"):
            items = items[1:]
        if not items:
            return
        array = len(items[0]) == 3
        first, line = ("", 0) if array else items[0]
        if first in _BLOCKS or first in ("elif", "[", "[[", "test", "function", "select"):
            for raw, at in items[1:]:
                self.words(raw, at)   # its variables are used
            if first == "while" and [raw for raw, _ in items[1:]] in (["true"], [":"]):
                self.note(line, VARIABLE, "a loop that starts the training again when it ends: --resume auto goes on")
            elif first in _BLOCKS:
                self.blocks.append(self.note(line, VARIABLE, "decides on commands of the shell alone"))
            return
        if first in ("fi", "esac", "done"):
            self.blocks = self.blocks[:-1]
        exports = first in _EXPORTS
        rest = items[1:] if exports else items
        assigned = []
        while rest and (len(rest[0]) == 3 or _ASSIGNMENT.match(rest[0][0])):
            assigned.append(rest[0])
            rest = rest[1:]
        for item in assigned:
            self.assign(item, first == "export" or bool(rest))
        if exports:
            self.exported.update(raw for raw, _ in rest)
        elif rest:
            self.command([(raw, at) for raw, at in (item[:2] for item in rest if len(item) == 2)])
        if assigned or (rest and self.commands and self.commands[-1][0] == rest[0][1]):
            for finding in self.blocks:
                finding.action, finding.fact = UNKNOWN, ("not evaluated: what it decides on is read as if it were so; "
                                                         "check the lines that depend on it")
            self.blocks = []

    def assign(self, item, exported):
        if len(item) == 3:
            name, append, parts = item
            words = [word for raw, line in parts for word in self.words(raw, line)]
            line = parts[0][1] if parts else 1
            self.arrays.add(name)
        else:
            match = _ASSIGNMENT.match(item[0])
            name, append, line = match[1], match[2], item[1]
            value = self.text(item[0][match.end():], line)
            words = [(w.group(), line + value.count("\n", 0, w.start())) for w in re.finditer(r"\S+", value)]
            words = words if "\n" in value or value.startswith("-") else [(value, line)]
        if name not in self.given:
            if append and name in self.values:
                self.values[name].extend(words)
            else:
                self.values[name] = words
            self.count(words, line)
        self.assigned[name] = line
        if exported:
            self.exported.add(name)

    def command(self, items):
        line, words = items[0][1], [word for raw, at in items for word in self.words(raw, at)]
        first = words[0][0] if words else ""
        if first.startswith("--") and self.commands:
            self.note(line, VARIABLE, f"bash takes this line for a separate command: the one of line "
                      f"{self.commands[-1][0]} ended before it (a comment or an end of line without \\ in between); "
                      "read here as it was meant", text="a line that begins with an option")
            self.commands[-1][1].extend(words)
        elif first in COMMANDS.split():
            pass   # a command of the shell, no part of the training
        elif any(word.startswith("-") for word, _ in words):
            self.commands.append((line, words))
        elif words:
            self.note(line, UNKNOWN, "neither an assignment nor a command with options")

    # ---- the training command ----

    def choose_command(self):
        """Takes the command that has most options; without one, the arguments alone, for a script that sources them."""
        self.commands.sort(key=lambda c: (-sum(w.startswith("--") for w, _ in c[1]),
                                          -sum(w.startswith("-") for w, _ in c[1])))
        if self.commands:
            chosen, words = self.commands[0]
            for line, _ in self.commands[1:]:
                self.note(line, UNKNOWN, f"another command than the training of line {chosen}: import one at a time")
        else:
            names = [n for n, words in self.values.items() if n in self.arrays or any("--" in w for w, _ in words)]
            self.used.update(names)
            words = [word for n in names for word in self.values[n]]
        program = next((i for i, (w, _) in enumerate(words) if _LLMC.match(w)), -1)
        one_dash = program >= 0
        if program < 0:
            program = next((i + (w == "-m") for i, (w, _) in enumerate(words) if w.endswith(".py") or w == "-m"), -1)
        if program < 0:
            program = next((i - 1 for i, (w, _) in enumerate(words) if w.startswith("-")), -1)
        self.launcher = self.options(words[:max(program, 0)], True)
        self.settings = self.options(words[program + 1:], False, one_dash)

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

    def read_environment(self):
        """Variables that are exported, or that nothing in the script uses."""
        for name, line in self.assigned.items():
            value = " ".join(word for word, _ in self.values[name])
            if name in self.arrays and name not in self.used:
                self.note(line, NONE, "no command is given these words", text=f"{name}=(...)")
            elif name in self.exported or name not in self.used:
                key = name if name in self.exported else "(not exported) " + name
                self.environment.append(Setting(self.name, line, key, value, f"{name}={value}"[:78]))
