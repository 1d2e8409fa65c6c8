#!/usr/bin/env python3
"""Conversations -> token shards through a chat template, with loss masks: only answers count as targets.

  data/prepare_chat.py --tokenizer Meta-Llama-3-8B-Instruct/tokenizer.json --out shards/ultrachat
  data/prepare_chat.py --tokenizer .../tokenizer.json --out shards/mine conversations/*.jsonl
  data/prepare_chat.py --tokenizer bytes --template plain --out DIR conversations.jsonl    # no packages needed

Inputs: JSON lines and parquet files, folders of them, and Hugging Face datasets, streamed (ultrachat_200k, which is the
default, or hf:OWNER/NAME). The field --messages-field of a row is a list of {role, content}, or of {from, value} as in
ShareGPT. Conversations without an answer are skipped. An unknown role is an error that names it; --role says what it
is. A field that the template does not render is an error, too; --ignore-fields leaves it out. Everything else,
interrupted runs too, is as with prepare_text.py. README.md describes the loss mask and the templates: model renders the
chat template beside the tokenizer.json, llama3 writes Llama-3-Instruct's, and plain "User: ..." and "Assistant: ...".
"""
import argparse
import functools
import json
import shlex
import sys
from pathlib import Path

sys.path[:0] = [str(p / "scripts") for p in Path(__file__).resolve().parents if (p / "scripts/llmfp8").is_dir()]
from llmfp8.chat_templates import TEMPLATES, end_of_turn, template_beside  # noqa: E402
from llmfp8.shard_pipeline import report, run  # noqa: E402
from llmfp8.support import InputError, Parser, parse_json, run_main  # noqa: E402
from llmfp8.text_shards import Tokenize, add_options, plan_of  # noqa: E402
from llmfp8.text_sources import NotText, utf8_of  # noqa: E402
from llmfp8.text_tokenizers import SENTINEL, load_tokenizer  # noqa: E402

# Roles, and ShareGPT's names for them. The contents of "assistant" are targets.
ROLES = {**{role: role for role in ("system", "developer", "user", "assistant", "tool", "ipython")},
         "human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}
# What says nothing to a model: facts about a row.
ABOUT_A_ROW = {"id", "idx", "uuid", "prompt_id", "conversation_id", "source", "dataset"}
NOTHING = (None, "", [], {})


def message_of(message, number, roles, ignored):
    """({role, content and the other fields that say something}, whether it is a target) of a message."""
    where = f"a list whose message {number}"
    if not isinstance(message, dict):
        raise InputError(f"{where} is {type(message).__name__}, not an object")
    rest = {name: value for name, value in message.items() if value not in NOTHING and name not in ignored}
    role, content = (rest.pop(a) if a in rest else rest.pop(b, None)
                     for a, b in (("role", "from"), ("content", "value")))
    if content is None and (rest or set(message) - {"role", "from"}):   # an empty one, or a call in place of words
        content = next((message[name] for name in ("content", "value") if message.get(name) is not None), "")
    if not isinstance(role, str) or not isinstance(content, str):
        raise InputError(f"{where} has no text in role and content, or in from and value "
                         f"(there is: {', '.join(sorted(message))})")
    if role not in roles:
        raise InputError(f"{where} has the unknown role {json.dumps(role)} (known: {', '.join(roles)}); pass --role "
                         f"{shlex.quote(role)}=assistant if its contents are targets, else =user")
    weight = rest.pop("weight", None)
    if weight not in (None, 0, 1) or weight == 1 and roles[role] != "assistant":
        raise InputError(f"{where} has the weight {json.dumps(weight)}: a loss mask has 0 and 1, for answers")
    return ({"role": roles[role], "content": content, **rest},
            roles[role] == "assistant" and weight != 0 and bool(content.strip() or rest))


def row_of(row, field, ignored):
    """(messages, tools) of a row whose field is a list. Fields that are neither are refused."""
    messages = row[field]
    rest = {name: value for name, value in row.items()
            if value not in NOTHING and name not in ignored and name not in ABOUT_A_ROW and name != field}
    tools, system = rest.pop("tools", None), rest.pop("system", None)
    try:
        tools = parse_json(tools) if isinstance(tools, str) else tools
    except ValueError:
        pass
    if tools is not None and not isinstance(tools, list):
        raise InputError("field 'tools' is not a list, or JSON of one")
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    if system is not None:
        if not isinstance(system, str) or "system" in (first.get("role"), first.get("from")):
            raise InputError("field 'system' is not text, or there is a system message, too")
        messages = [{"role": "system", "content": system}, *messages]
    if rest.get("prompt") in (first.get("content", ""), first.get("value", "")):   # as in ultrachat_200k
        del rest["prompt"]
    if rest:
        raise InputError(f"the fields {', '.join(rest)} are not read: pass --ignore-fields {','.join(rest)} if the "
                         "conversation is whole without")
    return messages, tools


def conversation_of(row, field, roles, ignored, template, tokenizer):
    """Makes JSON of a row's text, as [[part, counts], ...]; b"" if there is no answer."""
    if row[field] is None:
        return b""
    if not isinstance(row[field], list):
        raise InputError(f"field '{field}' is {type(row[field]).__name__}, not a list of messages")
    messages, tools = row_of(row, field, ignored)
    try:
        turns = [message_of(message, number, roles, ignored) for number, message in enumerate(messages, 1)]
    except InputError as error:
        raise InputError(f"field '{field}' is {error}") from None
    targets = [number for number, (_, counts) in enumerate(turns) if counts]
    if not targets:
        return b""
    spelled = json.dumps([[message for message, _ in turns], tools], ensure_ascii=False)
    if SENTINEL in spelled:
        raise NotText("the noncharacter U+FDD0")
    marked = tokenizer.spelled.sub(lambda found: found[0][0] + SENTINEL + found[0][1:], spelled)
    parts = template.parts(*json.loads(marked), targets)
    utf8_of("".join(text for text, _ in parts))   # before JSON escapes what is no text
    return json.dumps(parts, ensure_ascii=False).encode()


class TokenizeChat(Tokenize):
    def encode_into(self, out, document):
        ids, mask = self.tokenizer.encode_marked(json.loads(document))
        separator = self.tokenizer.separator
        if ids[:1] != [separator]:
            ids, mask = [separator, *ids], b"\0" + mask
        if separator in ids[1:]:
            raise InputError(f"the template writes {self.tokenizer.separator_text}, which starts a document, inside of "
                             "a conversation; pass --separator with a special token that it does not use")
        out.extend(ids)
        return mask


def make_encoder(load_arguments, token_bytes, valid_fraction):
    return TokenizeChat(load_tokenizer(*load_arguments), token_bytes, valid_fraction)


def parse_arguments():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="*", default=["ultrachat_200k"], metavar="INPUT",
                        help="file, folder, ultrachat_200k, hf:OWNER/NAME (default ultrachat_200k)")
    parser.add_argument("--template", default="model", choices=TEMPLATES, help="(default %(default)s)")
    parser.add_argument("--messages-field", default="messages", metavar="NAME", dest="text_field",
                        help="field or column with the messages (default %(default)s)")
    parser.add_argument("--role", action="append", default=[], metavar="NAME=ROLE", dest="roles",
                        help="treats messages of the role NAME as those of ROLE: " + ", ".join(dict.fromkeys(
                            ROLES.values())))
    parser.add_argument("--ignore-fields", default="", metavar="A,B",
                        help="fields of rows and messages to leave out, such as tool_calls")
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
    plan = plan_of(args, make_encoder, masked=True, empty="conversations without an answer")
    tokenizer = load_tokenizer(*plan.encoder_arguments[0])
    template = TEMPLATES[args.template](tokenizer)
    ignored = args.ignore_fields.split(",")
    for source in plan.reader.sources:
        if source.kind == "text":
            raise InputError(f"{source.path}: conversations are read from .jsonl and .parquet files (or --format)")
    plan.reader.convert = functools.partial(conversation_of, roles=roles, ignored=ignored, template=template,
                                            tokenizer=tokenizer)
    plan.reader.field_option, plan.reader.columns = "--messages-field", None   # all columns
    plan.meta["tokenizer"]["chat_template"] = plan.signature["--template"] = template.jinja
    if (end := end_of_turn(template, tokenizer)) is not None:
        plan.meta["tokenizer"]["end_of_turn"] = end
    plan.signature["--role"], plan.signature["--ignore-fields"] = args.roles or None, ignored
    if template_beside(tokenizer)[0] not in (None, template.jinja):
        print(f"note: this is not the chat template beside {args.tokenizer} (--template model); checkpoints get it in "
              "place of that")
    report(plan, run(plan))
    return 0


if __name__ == "__main__":
    run_main(main)
