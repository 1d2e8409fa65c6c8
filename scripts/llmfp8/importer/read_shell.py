"""Bash scripts as statements: words with quotes, comments, line continuations and arrays. Nothing is ever run."""
import dataclasses
import re

from ..support import InputError

_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETER = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?!$-])")
_ASSIGN = re.compile(r"[A-Za-z_]\w*\+?=$")


@dataclasses.dataclass
class Part:
    """A piece of a word: plain text, or what a $ stands for."""
    kind: str       # "text", "name" (a parameter expression), "sum" (arithmetic), "command"
    text: str
    quoted: bool
    line: int


@dataclasses.dataclass
class Array:
    """NAME=( words ) or NAME+=( words )."""
    name: str
    append: bool
    words: list
    line: int


class Reader:
    """Cuts a script into statements: [(line, items)], an item being a word (a list of parts) or an Array."""

    def __init__(self, name, text):
        self.name, self.text, self.at, self.line = name, text.replace("\r\n", "\n"), 0, 1
        self.broken = []   # lines whose backslash does not continue them

    def fail(self, line, problem, fix):
        raise InputError(f"{self.name}:{line}: {problem}; {fix}")

    def take(self, count=1):
        piece = self.text[self.at:self.at + count]
        self.line += piece.count("\n")
        self.at += count
        return piece

    def peek(self, count=1):
        return self.text[self.at:self.at + count]

    def statements(self):
        found, items, begin = [], [], 1
        while self.at < len(self.text):
            c = self.peek()
            if c in " \t":
                self.take()
            elif c == "\\" and self.continuation():
                pass
            elif c == "#":
                self.skip_comment()
            elif c in "\n;&|":
                self.take()
                if items:
                    found.append((begin, items))
                items = []
            elif c in "<>":
                self.redirect(items)
            elif c == "(" or c == ")":
                self.take()
            else:
                if not items:
                    begin = self.line
                items.append(self.item())
        if items:
            found.append((begin, items))
        return found

    def continuation(self):
        """Skips a backslash at the end of a line. Before blanks or a comment bash does not continue the line; these
        places are recorded."""
        match = re.compile(r"\\([ \t]*(?:#[^\n]*)?)(?:\n|\Z)").match(self.text, self.at)
        if not match:
            return False
        if match.group(1):
            self.broken.append(self.line)
        self.take(match.end() - self.at)
        return True

    def skip_comment(self):
        while self.at < len(self.text) and self.peek() != "\n":
            self.take()

    def redirect(self, items):
        """Skips > file, 2>&1 and <<EOF with its text."""
        mark = re.compile(r"[<>&|-]+").match(self.text, self.at).group()
        self.take(len(mark))
        adjacent = items and isinstance(items[-1], list) and len(items[-1]) == 1 and items[-1][0].text in ("1", "2")
        if adjacent:
            items.pop()
        while self.peek() and self.peek() in " \t":
            self.take()
        target = self.word()
        if mark.startswith("<<") and not mark.startswith("<<<"):
            end = "".join(part.text for part in target)
            match = re.compile(rf"\n[\t]*{re.escape(end)}(?=\n|\Z)").search(self.text, self.at)
            if not match:
                self.fail(self.line, f"text after << has no end {end}", "close it")
            self.take(match.end() - self.at)

    def item(self):
        line = self.line
        match = re.compile(r"([A-Za-z_]\w*)(\+?)=\(").match(self.text, self.at)
        if not match:
            return self.word()
        self.take(match.end() - self.at)
        words = []
        while True:
            c = self.peek()
            if not c:
                self.fail(line, f"array {match.group(1)}=( has no closing bracket", "add the ) that ends it")
            if c == ")":
                self.take()
                return Array(match.group(1), bool(match.group(2)), words, line)
            if c in " \t\n":
                self.take()
            elif c == "#":
                self.skip_comment()
            elif c == "\\" and self.continuation():
                pass
            elif c in ";&|()<>":
                self.fail(self.line, f"{c} inside array {match.group(1)}=(", "quote it")
            else:
                words.append(self.word())

    def word(self):
        parts = []

        def add(kind, text, quoted):
            if kind == "text" and parts and parts[-1].kind == "text" and parts[-1].quoted == quoted:
                parts[-1].text += text
            else:
                parts.append(Part(kind, text, quoted, self.line - (text == "\n")))   # a taken break counts already
        while self.at < len(self.text):
            c = self.peek()
            if c in " \t\n;&|()<>":
                break
            if c == "\\":
                if self.continuation():
                    break
                self.take()
                add("text", self.take(), True)
            elif c == "'":
                line = self.line
                end = self.text.find("'", self.at + 1)
                if end < 0:
                    self.fail(line, "a ' is never closed", "close it")
                add("text", self.text[self.at + 1:end], True)
                self.take(end + 1 - self.at)
            elif c == '"':
                self.double_quoted(add)
            elif c == "$" or c == "`":
                self.dollar(add, False)
            else:
                add("text", self.take(), False)
        return parts

    def double_quoted(self, add):
        line = self.line
        self.take()
        add("text", "", True)
        while True:
            c = self.peek()
            if not c:
                self.fail(line, 'a " is never closed', "close it")
            if c == '"':
                self.take()
                return
            if c == "\\":
                following = self.peek(2)[1:]
                self.take()
                # A continued line stays a line break: it separates words, and lines are counted by it.
                add("text", self.take() if following in '"\\$`\n' else "\\", True)
            elif c == "$" or c == "`":
                self.dollar(add, True)
            else:
                add("text", self.take(), True)

    def dollar(self, add, quoted):
        text, at = self.text, self.at
        if text.startswith("$((", at):
            end = self.closing(3, "((", "))")
            add("sum", text[at + 3:end], quoted)
            self.take(end + 2 - at)
        elif text.startswith(("$(", "`"), at):
            skip, end = (2, self.closing(2, "(", ")")) if text[at] == "$" else (1, text.find("`", at + 1))
            if end < 0:
                self.fail(self.line, "a ` is never closed", "close it")
            add("command", text[at + skip:end], quoted)
            self.take(end + 1 - at)
        elif text.startswith("${", at):
            end = self.closing(2, "{", "}")
            add("name", text[at + 2:end], quoted)
            self.take(end + 1 - at)
        else:
            match = _PARAMETER.match(text, at)
            if match:
                add("name", match.group(1), quoted)
                self.take(match.end() - at)
            else:
                add("text", self.take(), quoted)

    def closing(self, skip, opening, closing):
        """The position of the bracket that closes the one that begins here, which is `skip` characters long."""
        depth, text = 1, self.text
        for bracket in re.compile(f"{re.escape(closing)}|{re.escape(opening)}").finditer(text, self.at + skip):
            depth += 1 if bracket.group() == opening else -1
            if depth == 0:
                return bracket.start()
        return self.fail(self.line, f"{text[self.at:self.at + skip]} is never closed",
                         f"add the {closing} that ends it")


def assignment(item):
    """("NAME", append, parts of the value) of a word NAME=value or NAME+=value, or None."""
    if not isinstance(item, list) or not item or item[0].kind != "text" or item[0].quoted:
        return None
    head, equals, tail = item[0].text.partition("=")
    if not equals or not _ASSIGN.match(head + "="):
        return None
    first = Part("text", tail, False, item[0].line)
    return head.rstrip("+"), head.endswith("+"), [first] + item[1:]
