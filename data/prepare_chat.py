#!/usr/bin/env python3
"""Conversations -> token shards through a chat template, with loss masks: only answers count as targets.

  data/prepare_chat.py --tokenizer Meta-Llama-3-8B-Instruct/tokenizer.json --out shards/ultrachat
  data/prepare_chat.py --tokenizer .../tokenizer.json --out shards/mine conversations/*.jsonl
  data/prepare_chat.py --tokenizer bytes --template plain --out DIR conversations.jsonl    # no packages needed

Inputs: JSON lines and parquet files, folders of them, and Hugging Face datasets, streamed (ultrachat_200k, which is the
default, or hf:OWNER/NAME). The field --messages-field of a row is a list of {role, content}, or of {from, value} as in
ShareGPT. Conversations without an answer are skipped. An unknown role is an error that names it; --role says what it
is. Everything else, interrupted runs too, is as with prepare_text.py; README.md describes the loss mask.

--template llama3: <|begin_of_text|>, then for each message <|start_header_id|>ROLE<|end_header_id|>, an empty line, the
content without surrounding spaces, and <|eot_id|>. The assistant's contents and their <|eot_id|> count as targets.
--template plain, for any tokenizer: the separator, then "User: ", "Assistant: ", ... and the content, each followed by
an empty line, which counts as a target, too, after an answer.
"""
import argparse
import functools
import json
import shlex
import sys
from pathlib import Path

sys.path[:0] = [str(p / "scripts") for p in Path(__file__).resolve().parents if (p / "scripts/llmfp8").is_dir()]
from llmfp8.shard_pipeline import report, run  # noqa: E402
from llmfp8.support import InputError, Parser, run_main  # noqa: E402
from llmfp8.text_shards import Tokenize, add_options, plan_of  # noqa: E402
from llmfp8.text_sources import utf8_of  # noqa: E402
from llmfp8.text_tokenizers import load_tokenizer  # noqa: E402

# Roles, and ShareGPT's names for them. The contents of "assistant" are targets.
ROLES = {**{role: role for role in ("system", "developer", "user", "assistant", "tool", "ipython")},
         "human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}


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
        self.begin = tokenizer.separator
        self.encode = lambda text: list(tokenizer.encode(text.encode()))

    def message(self, role, content):
        return self.encode(f"{role.capitalize()}: "), self.encode(f"{content}\n\n")


TEMPLATES = {"llama3": Llama3Template, "plain": PlainTemplate}


def conversation_of(messages, roles):
    """Converts the field's value to [[role, content], ...] as JSON; b"" if there is no answer."""
    if messages is None:
        return b""
    if not isinstance(messages, list):
        raise InputError(f"{type(messages).__name__}, not a list of messages")
    turns = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise InputError(f"a list whose message {number} is {type(message).__name__}, not an object")
        role, content = (message.get(a) if message.get(a) is not None else message.get(b)
                         for a, b in (("role", "from"), ("content", "value")))
        if not isinstance(role, str) or not isinstance(content, str):
            raise InputError(f"a list whose message {number} has no text in role and content, or in from and value "
                             f"(there is: {', '.join(sorted(message))})")
        if role not in roles:
            raise InputError(f"a list whose message {number} has the unknown role {json.dumps(role)} (known: "
                             f"{', '.join(roles)}); pass --role {shlex.quote(role)}=assistant if its contents are "
                             "targets, else =user")
        turns.append([roles[role], utf8_of(content).decode().strip()])
    answered = any(role == "assistant" and content for role, content in turns)
    return json.dumps(turns, ensure_ascii=False).encode() if answered else b""


class TokenizeChat(Tokenize):
    def __init__(self, tokenizer, token_bytes, valid_fraction, template):
        super().__init__(tokenizer, token_bytes, valid_fraction)
        self.template = TEMPLATES[template](tokenizer)

    def encode_into(self, out, document):
        out.append(self.template.begin)
        mask = bytearray(1)
        for role, content in json.loads(document):
            head, body = self.template.message(role, content)
            out.extend(head + body)
            mask += bytes(len(head)) + bytes([role == "assistant"]) * len(body)
        return mask


def make_encoder(load_arguments, token_bytes, valid_fraction, template):
    return TokenizeChat(load_tokenizer(*load_arguments), token_bytes, valid_fraction, template)


def parse_arguments():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="*", default=["ultrachat_200k"], metavar="INPUT",
                        help="file, folder, ultrachat_200k, hf:OWNER/NAME (default ultrachat_200k)")
    parser.add_argument("--template", default="llama3", choices=TEMPLATES, help="(default %(default)s)")
    parser.add_argument("--messages-field", default="messages", metavar="NAME", dest="text_field",
                        help="field or column with the messages (default %(default)s)")
    parser.add_argument("--role", action="append", default=[], metavar="NAME=ROLE", dest="roles",
                        help="treats messages of the role NAME as those of ROLE: " + ", ".join(dict.fromkeys(
                            ROLES.values())))
    parser.add_argument("--format", default="auto", choices=("auto", "jsonl", "parquet"),
                        help="of the files (default: by their names)")
    add_options(parser)
    parser.set_defaults(dataset_split="", document_bytes=0)
    args = parser.parse_args()
    ultrachat = args.inputs == ["ultrachat_200k"]
    args.dataset_split = args.dataset_split or ("train_sft" if ultrachat else "train")
    return args


def roles_of(words):
    """ROLES with the options --role."""
    roles = dict(ROLES)
    for word in words:
        name, equals, role = word.rpartition("=")
        if not equals or role not in ROLES:
            raise InputError(f"--role {word}: must be NAME=ROLE, with one of the roles {', '.join(ROLES)}")
        roles[name] = ROLES[role]
    return roles


def main():
    args = parse_arguments()
    roles = roles_of(args.roles)
    plan = plan_of(args, make_encoder, args.template, masked=True, empty="conversations without an answer")
    make_encoder(*plan.encoder_arguments)   # here rather than in a worker, if the template does not fit the tokenizer
    for source in plan.reader.sources:
        if source.kind == "text":
            raise InputError(f"{source.path}: conversations are read from .jsonl and .parquet files (or --format)")
    plan.reader.convert = functools.partial(conversation_of, roles=roles)
    plan.reader.field_option = "--messages-field"
    plan.meta["chat_template"] = plan.signature["--template"] = args.template
    plan.signature["--role"] = args.roles or None
    report(plan, run(plan))
    return 0


if __name__ == "__main__":
    run_main(main)
