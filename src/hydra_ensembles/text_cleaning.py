"""The repairs CLIP's tokenizers make to a string before they split it, with the standard library alone.

open_clip cleans with `ftfy` and then unescapes HTML twice. What is reproduced here: HTML entities, terminal
escapes, ligatures of Latin letters, full-width and half-width forms, curly quotes, surrogates, control
characters and Unicode normalisation. What is not: the repair of mojibake (UTF-8 text that was decoded with
a wrong encoding, such as "cafÃ©") and HTML entities misspelt in capitals ("&EACUTE;"); such text is left
as it is.
"""

import html
import re
import string
import unicodedata
from typing import Literal

TextCleaning = Literal["none", "whitespace", "lower", "canonicalize"]

_ENTITY = re.compile(r"&#?[0-9A-Za-z]{1,24};")
_TERMINAL_ESCAPE = re.compile("\x1b\\[[0-9;]*[a-zA-Z]")
_LIGATURES = "ĲĳŉǱǲǳǄǅǆǇǈǉǊǋǌﬀﬁﬂﬃﬄﬅﬆ"
_QUOTES = {"'": "\u02bc\u2018\u2019\u201a\u201b", '"': "\u201c\u201d\u201e\u201f"}
_DROPPED = (*range(0x09), 0x0B, *range(0x0E, 0x20), 0x7F, *range(0x206A, 0x2070), *range(0xFFF9, 0xFFFD), 0xFEFF)
_LINE_BREAKS = ("\r\n", "\r", "\u2028", "\u2029", "\x85")
_LIGATURE_PARTS = {ord(one): unicodedata.normalize("NFKC", one) for one in _LIGATURES} | {ord("ﬅ"): "ſt"}
_WIDTHS = {code: unicodedata.normalize("NFKC", chr(code)) for code in (0x3000, *range(0xFF01, 0xFFF0))}
_STRAIGHT_QUOTES = {ord(curly): straight for straight, curlies in _QUOTES.items() for curly in curlies}
_CONTROLS = dict.fromkeys(_DROPPED)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def clean_text(text: str, cleaning: TextCleaning) -> str:
    """Clean a string in one of the ways open_clip's tokenizers know.

    Args:
        text: Any string.
        cleaning: `"none"` leaves the text alone; `"whitespace"` repairs it and collapses white space;
            `"lower"` lower-cases it as well; `"canonicalize"` drops ASCII punctuation too.
    """
    if cleaning == "none":
        return text
    text = html.unescape(html.unescape(_repair(text))).strip()
    if cleaning == "canonicalize":
        text = text.replace("_", " ").translate(_PUNCTUATION)
    text = " ".join(text.split())
    return text if cleaning == "whitespace" else text.lower()


def _repair(text: str) -> str:
    """Repair line by line; from the first `<` on, entities are taken to be meant as written."""
    unescape, lines = True, []
    for line in re.split(r"(?<=\n)", text):
        unescape = unescape and "<" not in line
        lines.append(_repair_line(line, unescape))
    return "".join(lines)


def _repair_line(text: str, unescape: bool) -> str:
    """Apply all repairs until nothing changes any more: one can bring up something for another."""
    while True:
        before = text
        if unescape:
            text = _ENTITY.sub(_unescape, text)
        text = _TERMINAL_ESCAPE.sub("", text)
        text = text.translate(_LIGATURE_PARTS).translate(_WIDTHS).translate(_STRAIGHT_QUOTES)
        for line_break in _LINE_BREAKS:
            text = text.replace(line_break, "\n")
        # pairs of surrogates become the character they stand for, lone ones the replacement character
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        text = unicodedata.normalize("NFC", text.translate(_CONTROLS))
        if text == before:
            return text


def _unescape(entity: re.Match[str]) -> str:
    """The character an entity stands for; entities that are not known as a whole stay as they are."""
    character = html.unescape(entity.group())
    return entity.group() if ";" in character and len(character) > 1 else character
