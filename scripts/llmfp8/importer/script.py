"""Reads a launch script: the words of its training command, which become settings, and its environment. Nothing is run:
plain NAME=value, arrays and ${NAME:-default} are put in where a command uses them. Any other expansion has no value
here, and the report asks for it. Of a condition one branch is read."""
import re
import shlex

from ..support import InputError
from .rows import MEANT, MOST_IN_VARIABLES, NONE, UNKNOWN, Setting, find_row
from .tables import ENVIRONMENT

# In the text, a line begins with the character 1 and its number, until it is cut into words.
_QUOTE = r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\."
_EXPANSION = r"\$\(\([^()]*\)\)|\$\([^()]*\)|\$\{(?:[^{}]|\$\{[^{}]*\})*\}|\$(?![({])|`[^`]*`"
_ARRAY = rf"\((?:{_QUOTE}|{_EXPANSION}|[^()'\"\\$`])*\)"
_COMMENT = re.compile(rf"({_QUOTE})|(?<!\S)#[^\n]*", re.S)
_HERE = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1[^\n]*\n(?:[^\n]*\n)*?\x01\d+ [ \t]*\2[ \t]*(?=\n|\Z)")
_STATEMENT = re.compile(rf";;|(?:={_ARRAY}|{_QUOTE}|{_EXPANSION}|[<>]&|[^\n;&|'\"\\$`])+", re.S)
_ASSIGNMENT = re.compile(rf"\s*(\w+)(\+?)=({_ARRAY}|(?:{_QUOTE}|{_EXPANSION}|[^\s'\"\\$`])*)", re.S)
_REFERENCE = re.compile(r"\x01(?P<line>\d+)|\"?\$\{(?P<array>\w+)\[[@*]\]\}\"?|\"?\$(?:\{[@*][^{}]*\}|[@*])\"?|"
                        r"\$\{(?P<name>\w+)(?::?[-=](?P<default>[^{}]*))?\}|\$(?P<bare>\w+)")
_KEYWORDS = re.compile(r"\s*(?:\x01\d+\s*|(?:then|do|else)(?!\S))*")
# First words of commands that are no part of the training.
_COMMANDS = ("mkdir cd echo set source . module pip pip3 nvidia-smi sleep exit wait ulimit printf ls rm cp date trap "
             "unset conda true shift umask hostname pwd ray done break continue make { } : mv touch env tee chmod apt "
             "apt-get cat while until for [ [[ test function select if elif case").split()
_PROGRAM = re.compile(r"-m|.*\.py")


def words_of(text, line):
    """[(word, line)]. A quoted text that begins with a dash is cut, too, since options were meant."""
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError:   # a quotation mark in the value of a variable
        words = text.split()
    found = []
    for word in words:
        for piece in word.split() if re.match(r"(?:\x01\d+|\s)*-", word) else [word]:
            if re.fullmatch(r"\x01\d+", piece):
                line = int(piece[1:])
            else:
                found.append((re.sub(r"\x01\d+ ?", "", piece), line))
    return found


class Script:
    """`settings`: options of the training command, `launcher`: those of its launcher, `findings`: about the rest."""

    def __init__(self, name, text, given):
        self.name, self.given, self.lines, self.line = name, given, text.replace("\x01", "").split("\n"), 1
        self.values, self.assigned = dict(given), {}   # of a variable: its text, the line of its last assignment
        self.exported, self.used = set(), set()
        self.commands, self.findings = [], []          # of commands: (line, [(word, line)])
        for text in self.one_branch(_STATEMENT.findall(self.prepared())):
            self.statement(text)
        self.launcher, self.settings = self.chosen_command()
        self.read_environment()

    def note(self, line, action, fact, text=None, error=0):
        text = (text or self.lines[line - 1].strip())[:78]
        self.findings.append(Setting(self.name, line, "", None, text, action, fact, error))

    def prepared(self):
        """The text with numbers of lines, without comments and input of commands."""
        lines = []
        for number, line in enumerate(self.lines, 1):
            broken = re.match(r"([^#]*\\)[ \t]+(?:#.*)?$", line)
            if broken:
                self.note(number, MEANT, "this backslash is not the last character of its line, so bash ends the "
                          "command here, and the options of the next lines never reach it",
                          "\\ with something behind it")
            lines.append(f"\x01{number} {broken[1] if broken else line}")
        text = _COMMENT.sub(lambda match: match[1] or "", _HERE.sub("", "\n".join(lines)))
        rest = re.sub(rf"{_QUOTE}|`[^`]*`", lambda match: " " * len(match[0]), text, flags=re.S)
        opening = re.search(r"['\"`]|\w=\((?![^()]*\))", re.sub(r"\$\([^()]*\)", lambda m: " " * len(m[0]), rest))
        if opening:
            line = text[:opening.start()].rpartition("\x01")[2].split()[0]
            raise InputError(f"{self.name}:{line}: {opening[0]} is never closed; close it")
        return text

    def one_branch(self, statements):
        """The statements with one branch of each condition, which is not evaluated: the first without --mock-data."""
        open_ifs = [(1, [[]])]   # (line, branches)
        for text in statements:
            lines = re.findall(r"\x01(\d+)", text)
            self.line = int(lines[-1]) if lines else self.line
            first = re.search(r"(?<!\S)(?!\x01)\S+|$", text)[0]
            if first in ("if", "case"):
                open_ifs[-1][1][-1].append(text)
                open_ifs.append((self.line, [[]]))
                continue
            elif first in ("else", "elif", ";;") and len(open_ifs) > 1:
                open_ifs[-1][1].append([])
            elif first in ("fi", "esac") and len(open_ifs) > 1:
                chosen = self.chosen_branch(*open_ifs.pop())
                open_ifs[-1][1][-1] += chosen
                continue
            open_ifs[-1][1][-1].append(re.sub(r"^(\s*\x01\d+)?\s*[^\s()=]+\)", r"\1", text))   # the pattern of a case
        return [text for _, branches in open_ifs for branch in branches for text in branch]

    def chosen_branch(self, line, branches):
        chosen = next(branch for branch in branches + [[]] if "--mock-data" not in " ".join(branch))
        telling = [branch for branch in branches if re.search(r"\w\+?=|\s--", " ".join(branch))]
        left = [re.search(r"\x01(\d+)", " ".join(b) + f"\x01{line}")[1] for b in telling if b is not chosen]
        if telling:
            self.note(line, UNKNOWN, "a condition is not evaluated: its first branch without --mock-data is read"
                      + f", and what begins in line {' or '.join(left)} is left out" * bool(left))
        return chosen

    def expanded(self, text):
        """A text with the values of variables; what has no value stays as it is."""
        def value(match):
            if match["line"]:
                self.line = int(match["line"])
                return match[0]
            name = match["array"] or match["name"] or match["bare"]
            self.used.add(name)
            found = self.values.get(name)
            if found is None:
                return match[0] if name and match["default"] is None else match["default"] or ""
            return f"{found} \x01{self.line} " if "\x01" in found else found
        for _ in range(8):   # defaults within defaults
            text, before = _REFERENCE.sub(value, text), text
            if text == before:
                break
            if len(text) > MOST_IN_VARIABLES:
                raise InputError(f"{self.name}:{self.line}: a variable becomes more than {MOST_IN_VARIABLES} "
                                 "characters; name a script of one training")
        return text

    def statement(self, text):
        begin = _KEYWORDS.match(text).end()
        self.expanded(text[:begin])   # for its line
        line, first = self.line, (text[begin:].split() or [""])[0]
        exports = first in ("export", "declare", "local", "readonly", "typeset")
        at, assigned = begin + len(first) * exports, []
        while match := _ASSIGNMENT.match(text, at):
            at = match.end()
            assigned.append(match)
        rest = text[at:]
        for match in assigned:
            self.assign(match, exports and first == "export" or bool(rest.strip()))
        words = words_of(self.expanded(rest), line)
        if exports:
            self.exported.update(word for word, _ in words)
        elif words:
            self.command(line, words)

    def assign(self, match, exported):
        name, raw = match[1], match[3]
        value = self.expanded(raw[1:-1] if raw.startswith("(") else raw)
        if not raw.startswith("("):   # the text without quotes; a continued line stays a line break
            value = re.sub(_QUOTE, lambda m: m[0][1:-1] if m[0][0] != "\\" else m[0][1:].strip("\n"), value, flags=re.S)
        if raw.startswith("(") or re.match(r"(?:\x01\d+|\s)*-", value):
            value = f"\x01{self.line} {value}"
        if name not in self.given:
            self.values[name] = f"{self.values.get(name, '')} {value}" if match[2] else value
        self.assigned[name] = self.line
        if exported:
            self.exported.add(name)

    def command(self, line, words):
        end = next((i for i, (word, _) in enumerate(words) if re.match(r"\d?[<>]", word)), len(words))
        words, first = words[:end], words[0][0]
        if first.startswith("--") and self.commands:
            self.note(line, MEANT, f"bash takes this line for a separate command: the one of line "
                      f"{self.commands[-1][0]} ended before it (a comment or an end of line without \\ in between)",
                      "a line that begins with an option")
            self.commands[-1][1].extend(words)
        elif first not in _COMMANDS and any(word.startswith("-") for word, _ in words):
            self.commands.append((line, words))
        elif first not in _COMMANDS and not first.endswith("()"):
            self.note(line, UNKNOWN, "neither an assignment nor a command with options")

    def chosen_command(self):
        """(options of the launcher, options of the program) of the command that has most options; without a command,
        of what the variables hold, for a script that others source."""
        self.commands.sort(key=lambda c: -sum(w.startswith("--") for w, _ in c[1]))
        for line, _ in self.commands[1:]:
            self.note(line, UNKNOWN, f"another command than the training of line {self.commands[0][0]}: import one at "
                      "a time")
        names = [] if self.commands else [name for name, text in self.values.items() if "--" in text]
        self.used.update(names)
        words = self.commands[0][1] if self.commands else words_of(" ".join(self.values[name] for name in names), 1)
        program = next((i + (w == "-m") for i, (w, _) in enumerate(words) if _PROGRAM.fullmatch(w)), -1)
        return self.options(words[:max(0, program)]), self.options(words[program + 1:], program >= 0)

    def options(self, words, arguments=False):
        """Words as settings. Values are the words up to the next option; a negative number is a value. With
        `arguments`, words before the first option are arguments of the program, too."""
        found = []
        for word, line in words:
            if re.match(r"--?[A-Za-z]", word):
                shown, equals, value = word.partition("=")
                found.append((shown, [value] if equals else [], line))
            elif "[@]" in word or "[*]" in word or word.startswith("$") and not found:
                self.note(line, UNKNOWN, f"{word} has no value in this script: name it with --set NAME=VALUE", word)
            elif found:
                found[-1][1].append(word)
            elif arguments:
                self.note(line, UNKNOWN, "a word that belongs to no option", word)
        settings = []
        for shown, values, line in found:
            name = shown.lstrip("-")
            if any("$" in value for value in values):
                values = [self.given.get(name.replace("-", "_"), " ".join(values))]
            settings.append(Setting(self.name, line, name, values[0] if len(values) == 1 else values or True,
                                    " ".join([shown, *values])[:78]))
        return settings

    def read_environment(self):
        """Tells of variables that are exported, or that nothing in the script uses."""
        for name, line in self.assigned.items():
            text = name + "=" + " ".join(word for word, _ in words_of(self.values[name], 1))
            row = find_row(ENVIRONMENT, Setting(self.name, line, name, text.partition("=")[2], text))
            if name in self.exported:
                self.note(line, row.action, row.fact, text, row.error)
            elif name not in self.used:
                self.note(line, NONE, "not exported, and no command in the script is given it", text)
