"""Chat templates: those of data/prepare_chat.py, which work on tokens, and a model's own (jinja2), for prompts of
scripts/generate."""
import json
from datetime import datetime
from pathlib import Path

from .support import InputError, need, one_line, parse_json, read_bounded

MOST_BYTES = 1 << 24
OWN_TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")


class Llama3Template:
    def __init__(self, tokenizer):
        names = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
        ids = [tokenizer.token_id(name) for name in names]
        missing = [name for name, token in zip(names, ids) if token is None]
        if missing:
            raise InputError(f"--template llama3: the tokenizer {tokenizer.name} has no token {', '.join(missing)}; "
                             "take Llama-3-Instruct's tokenizer.json, or --template plain")
        self.begin, self.start, self.end, self.end_of_turn = ids
        if tokenizer.separator != self.begin:
            raise InputError("--template llama3 begins a document with <|begin_of_text|>: leave --separator out")
        self.encode = lambda text: list(tokenizer.encode(text.encode()))
        self.blank = self.encode("\n\n")

    def message(self, role, content):
        """(tokens of the header, tokens of the content and of its end)."""
        return ([self.start, *self.encode(role), self.end, *self.blank], [*self.encode(content), self.end_of_turn])


class PlainTemplate:
    def __init__(self, tokenizer):
        self.begin, self.end_of_turn = tokenizer.separator, None
        self.encode = lambda text: list(tokenizer.encode(text.encode()))

    def message(self, role, content):
        return self.encode(f"{role.capitalize()}: "), self.encode(f"{content}\n\n")


TEMPLATES = {"llama3": Llama3Template, "plain": PlainTemplate}


class TokenTemplate:
    """Prompts in the format of one of TEMPLATES, for models that were trained on shards of data/prepare_chat.py."""

    def __init__(self, template):
        self.template = template
        self.stop_ids = [] if template.end_of_turn is None else [template.end_of_turn]

    def encode(self, messages):
        """The tokens of the messages and of the header of the answer."""
        ids = [self.template.begin]
        for role, content in messages:
            head, body = self.template.message(role, content.strip())
            ids += head + body
        return ids + self.template.message("assistant", "")[0]


class OwnTemplate:
    """The chat template of a model's folder, rendered as transformers' apply_chat_template does."""

    def __init__(self, folder, tokenizer):
        config, self.path = tokenizer_config(folder), folder / OWN_TEMPLATE_FILES[0]
        if self.path.is_file():
            text = read_bounded(self.path, MOST_BYTES, "a chat template").decode("utf-8", "replace")
        else:
            text, self.path = default_template(config), folder / OWN_TEMPLATE_FILES[1]
        if not hasattr(tokenizer, "encode_marked"):
            raise InputError(f"{self.path}: a model's chat template needs its tokenizer.json: leave --tokenizer "
                             f"{tokenizer.name} out, or pass --template")
        jinja2 = need("jinja2", "jinja2", "the model's chat template (--template llama3 and plain need none)")
        sandbox = need("jinja2.sandbox", "jinja2", "the model's chat template")
        environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                            extensions=["jinja2.ext.loopcontrols"])
        environment.globals.update(raise_exception=self.refuse, strftime_now=datetime.now().strftime)
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        self.tokenizer, self.error = tokenizer, jinja2.TemplateError
        self.tokens = {name: token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token",
                                                                       "unk_token")}
        try:
            self.template = environment.from_string(text)
        except (jinja2.TemplateError, RecursionError) as error:
            raise InputError(f"{self.path}: not a chat template: {one_line(error)}") from None
        stop = tokenizer.token_id(self.tokens["eos_token"] or "")
        self.stop_ids = [] if stop is None else [stop]

    def refuse(self, reason):
        raise InputError(f"{self.path}: the chat template refuses these messages: {reason}")

    def encode(self, messages):
        try:
            text = self.template.render(messages=[{"role": role, "content": content} for role, content in messages],
                                        add_generation_prompt=True, **self.tokens)
        except InputError:
            raise
        except Exception as error:   # whatever a template calls
            raise InputError(f"{self.path}: the chat template fails: {one_line(error)}") from None
        return self.tokenizer.encode_marked(text)


def tokenizer_config(folder):
    """The object in tokenizer_config.json, {} without the file."""
    path = folder / OWN_TEMPLATE_FILES[1]
    if not path.is_file():
        return {}
    try:
        config = parse_json(read_bounded(path, MOST_BYTES, "a tokenizer_config.json"))
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {one_line(error)}") from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: {type(config).__name__}, not an object")
    return config


def default_template(config):
    """The template as text; of several with names, "default". "" if there is none."""
    value = config.get("chat_template") or ""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default") or ""
    return value if isinstance(value, str) else ""


def token_text(token):
    """A special token of tokenizer_config.json: its text, or an object with it; None if it is neither."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def has_own_template(folder):
    return (Path(folder) / OWN_TEMPLATE_FILES[0]).is_file() or bool(default_template(tokenizer_config(folder)))
