"""All rows that the table can have, in its order."""

from collections.abc import Sequence

from kvcourse.bench.contestants import Compiled, Dense, Int4, Int8, Naive
from kvcourse.bench.llama_cpp_row import LlamaCpp
from kvcourse.bench.paged_row import PagedBatch
from kvcourse.bench.transformers_rows import Transformers, TransformersStatic

COURSE = [Naive, Dense, Compiled, Int8, Int4, PagedBatch]  # the course's own
PEERS = [Transformers, TransformersStatic, LlamaCpp]  # other programs


def choose(titles: Sequence[str], only: str | None) -> list[str]:
    """Those of the rows' `titles` that `only`, "title,title", names; None names all. Raises `ValueError` for a title
    that none of them has."""
    if only is None:
        return list(titles)
    wanted = [title.strip() for title in only.split(",")]
    for title in wanted:
        if title not in titles:
            raise ValueError(
                f"--only {only}: there is no row {title!r}. The rows are {', '.join(titles)}; --peers and --vllm "
                "PYTHON bring those of other programs."
            )
    return [title for title in titles if title in wanted]
