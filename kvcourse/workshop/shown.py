"""Texts that others wrote, such as learners' answers and names of files: made fit for a terminal, a table, a
spreadsheet."""

FORMULA = "=+-@＝＋－＠"  # a cell of a spreadsheet that begins so is computed


def shown(text: str) -> str:
    """`text` on one line: blanks of any kind as blanks, other characters that are not printed (the codes that move a
    cursor, half characters) as Python writes them: `\\x1b`."""
    return "".join(c if c.isprintable() else " " if c.isspace() else ascii(c)[1:-1] for c in text)


def short(text: str, width: int = 40) -> str:
    """`text`, its end replaced by "..." where it is longer than `width`."""
    return text if len(text) <= width else f"{text[: width - 3]}..."


def cell(value):
    """`value` for a cell of a spreadsheet: a text that would be computed there gets an apostrophe before it."""
    computed = isinstance(value, str) and value.strip() and value.strip()[0] in FORMULA
    return f"'{value}" if computed else value
