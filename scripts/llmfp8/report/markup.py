"""The HTML of the page: one file without a network, whose script is allowed by its hash alone."""
import base64
import hashlib
import html
import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Characters that could end the element of the data or a line of a script, whatever a log has in its names.
UNSAFE = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def safe_json(value):
    """JSON that holds no markup."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).translate(UNSAFE)


def text(value):
    """HTML of any text; what is no character of a document becomes U+FFFD."""
    clean = "".join(c if c in "\n\t" or (c.isprintable() or c == "\u00a0") and not 0xD800 <= ord(c) < 0xE000
                    else "\ufffd" for c in str(value))
    return html.escape(clean)


def table(head, rows, caption=""):
    head = "".join(f"<th scope=col>{text(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<{'th scope=row' if i == 0 else 'td'}>{text(cell)}</{'th' if i == 0 else 'td'}>"
                                    for i, cell in enumerate(row)) + "</tr>\n" for row in rows)
    caption = f"<caption>{text(caption)}</caption>" if caption else ""
    return f"<div class=wide><table>{caption}<thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>\n"


def digest(content):
    """A source of a Content-Security-Policy: the hash of an element's content."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"


def page(title, body, script, data):
    """The document; `data` is what the script finds in the element of that name."""
    style = (HERE / "uPlot.min.css").read_text() + (HERE / "page.css").read_text()
    script = (HERE / "uPlot.iife.min.js").read_text() + script
    policy = (f"default-src 'none'; style-src {digest(style)}; script-src {digest(script)}; base-uri 'none'; "
              "form-action 'none'")
    return (f"<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            '<meta name=viewport content="width=device-width, initial-scale=1">\n'
            f"<title>{text(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n{body}"
            "<footer><details><summary>Charts are drawn by uPlot 1.6.31 (MIT licence)</summary><pre>"
            f"{text((HERE / 'uPlot.LICENSE').read_text())}</pre></details></footer>\n"
            f'<script type="application/json" id=data>{safe_json(data)}</script>\n<script>{script}</script>\n'
            "</body>\n</html>\n")
