"""The explorer of a notebook by itself: its cell, and before it only the cells that make what it needs."""

import ast
import re
import symtable

import nbformat


def explorer_alone(notebook) -> nbformat.NotebookNode:
    """A notebook of the title, the explorer and the code cells that it depends on.

    A cell that only changes an object which another cell made is not seen as needed.
    """
    needed, kept = set(), []
    for cell in reversed([cell for cell in notebook.cells if cell.cell_type == "code"]):
        bound, read = names(cell.source)
        if "kv.widgets.explore(" in cell.source or bound & needed:
            kept.insert(0, cell)
            needed = (needed - bound) | read
    return nbformat.v4.new_notebook(cells=[notebook.cells[0], *kept], metadata=notebook.metadata)


def names(source: str) -> tuple[set[str], set[str]]:
    """The names that a cell binds, and those that it reads before it has bound them itself."""
    bound, read = set(), set()
    for statement in ast.parse(re.sub(r"(?m)^(\s*)%.*$", r"\1pass", source)).body:
        top = symtable.symtable(ast.unparse(statement), "cell", "exec")
        outer = [name for table in tables(top) for name in table.get_symbols() if table is top or name.is_global()]
        read |= {name.get_name() for name in outer if name.is_referenced()} - bound
        bound |= {name.get_name() for name in top.get_symbols() if name.is_assigned() or name.is_imported()}
    return bound, read


def tables(table):
    yield table
    for child in table.get_children():
        yield from tables(child)
