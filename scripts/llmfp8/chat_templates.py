"""Chat templates, for data/prepare_chat.py: the text of a conversation, and which parts of it are targets.

Each template has jinja, which renders the same text in transformers, vLLM and llama.cpp, and parts(messages, tools,
targets), which returns [[text, 0 or 1], ...]; targets: the numbers of the messages that count, from 0.
"""
import json
import re

from .support import InputError, need, one_line, parse_json, read_bounded
from .text_tokenizers import SENTINEL

MAX_FILE_BYTES = 16 << 20
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LLAMA3 = ("<|begin_of_text|>{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + "
          "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}")

# Fields that may stay out of the text: a tool's answer follows its call.
SILENT = {"role", "tool_call_id", "id"}


def shortened(fields):
    """(name, the fields without its value) of each field; of a list without each of its elements."""
    for name, value in fields.items():
        if isinstance(value, list) and len(value) > 1:
            for i in range(len(value)):
                yield name, {**fields, name: value[:i] + value[i + 1:]}
        else:
            yield name, {key: "" if key == name else other for key, other in fields.items()
                         if key != name or name == "content"}


def unread(number, names, template):
    """The error for fields of a row (number 0) or message that do not reach the text."""
    fix = "take --template model, or pass" if template != "model" else "pass"
    where = f"message {number} has " if number else ""
    return InputError(f"{where}{', '.join(names)}, which --template {template} does not render: {fix} --ignore-fields "
                      f"{','.join(names)} if the text is right without")


def end_of_turn(template, tokenizer):
    """The token that ends an answer, None if that is text."""
    check, template.check = getattr(template, "check", None), None   # of the first conversation
    try:
        parts = template.parts([{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}], [], {1})
    except InputError:
        return None
    finally:
        template.check = check
    answer = [text for text, flag in parts if flag][-1]
    return next((token for text, token in tokenizer.markers.items() if answer.endswith(text)), None)


class PlainTemplate:
    """Words for roles, for any tokenizer."""
    name = "plain"

    def __init__(self, tokenizer):
        self.jinja = ("{{ " + json.dumps(tokenizer.separator_text) + " }}{% for message in messages %}"
                      "{{ message['role'] | capitalize + ': ' + message['content'] | trim + '\n\n' }}{% endfor %}"
                      "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}")

    def parts(self, messages, tools, targets):
        if tools:
            raise unread(0, ["tools"], self.name)
        parts = []
        for number, message in enumerate(messages):
            rest = sorted(message.keys() - SILENT - {"content"})
            if rest:
                raise unread(number + 1, rest, self.name)
            # The blank belongs to the first word's token in most tokenizers.
            parts += [[f"{message['role'].capitalize()}:", 0],
                      [f" {message['content'].strip()}\n\n", int(number in targets)]]
        return parts


def read_beside(tokenizer, name, convert):
    """convert(text) of the file of this name beside the tokenizer.json; None if there is none."""
    path = tokenizer.path and tokenizer.path.parent / name
    if not path or not path.is_file():
        return None
    try:
        return convert(read_bounded(path, MAX_FILE_BYTES, "a file of a tokenizer").decode())
    except ValueError as error:
        raise InputError(f"{path}: not readable: {error}") from None


def template_beside(tokenizer):
    """(the chat template beside the tokenizer.json or None, tokenizer_config.json)."""
    config = read_beside(tokenizer, "tokenizer_config.json", parse_json) or {}
    listed = config.get("chat_template")
    if isinstance(listed, list):
        listed = next((entry["template"] for entry in listed if entry["name"] == "default"), None)
    return read_beside(tokenizer, "chat_template.jinja", str) or listed, config


class ModelTemplate:
    """The chat template beside the tokenizer.json, rendered as by transformers."""
    name = "model"

    def __init__(self, tokenizer):
        jinja, config = template_beside(tokenizer)
        if not jinja:
            raise InputError("--template model: there is no chat_template.jinja, and no chat_template in a "
                             f"tokenizer_config.json, beside the tokenizer {tokenizer.name}; take --template plain "
                             "(any tokenizer) or llama3")
        named = {name: config.get(name) for name in SPECIAL_TOKENS}
        self._begin(tokenizer, jinja, {name: token["content"] if isinstance(token, dict) else token
                                       for name, token in named.items() if token})

    def _begin(self, tokenizer, jinja, names):
        self.jinja, self.names, self.template = jinja, names, self._compile(jinja)
        self.markers, self.check = tuple(tokenizer.markers), tokenizer.check_marked

    @staticmethod
    def _compile(text):
        sandbox = need("jinja2.sandbox", "jinja2", "a chat template")

        def fail(message):
            raise ValueError(message)
        environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                            extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = lambda value, ensure_ascii=False, **options: json.dumps(
            value, ensure_ascii=ensure_ascii, **options)
        # strftime_now is left out: shards must not depend on the day. Templates that use it have another way.
        environment.globals["raise_exception"] = fail
        try:   # transformers' own tag, which marks answers
            return environment.from_string(re.sub(
                r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})",
                lambda tag: tag[1] + ("endif" if tag[2] else "if true") + tag[3], text))
        except Exception as error:   # jinja2's own, and Python's of wrong literals
            raise InputError(f"not a chat template: {one_line(error)}") from None

    def _render(self, messages, tools, prompt=False):
        try:
            return self.template.render(messages=messages, tools=tools or None, documents=None,
                                        add_generation_prompt=prompt, **self.names)
        except Exception as error:   # a template is a program, and it may refuse
            raise InputError(f"the chat template refuses {len(messages)} messages: {one_line(error)}") from None

    def parts(self, messages, tools, targets):
        whole = self._render(messages, tools)
        self._require_read(messages, tools, whole)
        parts, at = [], 0
        for number in targets:
            before, after = self._render(messages[:number], tools, True), self._render(messages[:number + 1], tools)
            if not (after.startswith(before) and whole.startswith(after) and len(before) >= at):
                raise InputError(f"the chat template does not continue message {number + 1} where a generation "
                                 "prompt ends, or renders it otherwise when messages follow: give it weight 0, or take "
                                 "--template plain")
            answer = after[len(before):]
            ended = answer.rstrip()
            if ended.endswith(self.markers):   # nothing is generated after the end of a turn
                answer = ended
            parts += [[whole[at:len(before)], 0], [answer, 1]]
            at = len(before) + len(answer)
        parts.append([whole[at:], 0])
        if self.check and SENTINEL not in whole:   # once, in a text in which the library takes no words for markers
            self.check(parts)
            self.check = None
        return parts

    def _require_read(self, messages, tools, whole):
        """Refuses values without which the text would be the same."""
        def same(messages, tools):
            try:
                return self._render(messages, tools) == whole
            except InputError:
                return False
        for name, less in shortened({"tools": tools} if tools else {}):
            if same(messages, less.get(name)):
                raise unread(0, [name], self.name)
        at = 0
        for number, message in enumerate(messages):
            for name, less in shortened(message):
                place = whole.find(message[name].strip(), at) if name == "content" else -1
                at = max(at, place)
                if place < 0 and name not in SILENT and same([*messages[:number], less, *messages[number + 1:]], tools):
                    raise unread(number + 1, [name], self.name)


class Llama3Template(ModelTemplate):
    """That of Llama-3-Instruct, for base models."""
    name = "llama3"

    def __init__(self, tokenizer):
        names = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
        missing = [name for name in names if name not in tokenizer.markers]
        if missing:
            raise InputError(f"--template llama3: the tokenizer {tokenizer.name} has no token {', '.join(missing)}; "
                             "take Llama-3-Instruct's tokenizer.json, or --template plain")
        if tokenizer.separator_text != names[0]:
            raise InputError("--template llama3 begins a document with <|begin_of_text|>: leave --separator out")
        self._begin(tokenizer, LLAMA3, {})


TEMPLATES = {template.name: template for template in (ModelTemplate, Llama3Template, PlainTemplate)}
