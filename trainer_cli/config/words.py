"""How texts and lists are written on the command line: their quotes, their commas and their brackets."""

from __future__ import annotations


def as_text(text: str) -> str:
    """A text in the quotes that make it one: a pair for the shell, and one for the parser."""
    return f"'\"{text}\"'"


def unquoted(text: str) -> str:
    """A text without the one pair of quotes around it, where it has one."""
    quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" and text[0] not in text[1:-1]
    return text[1:-1] if quoted else text


def split_at_commas(text: str) -> list[str]:
    """Split at commas that stand in no bracket, brace or quote."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def closes_at_end(text: str) -> bool:
    """Whether the bracket that opens the text is the one that ends it: `[a,b]`, but not `[ab]*[cd]`."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter in "[{") - (letter in "]}")
        if depth == 0:
            return index == len(text) - 1
    return False
