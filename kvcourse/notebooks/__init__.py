"""The notebook builder: `notebooks/src/NN_topic.py` is the only place where a notebook is edited.

`source` turns a source into the learner's notebook and the worked one, `execute` runs a notebook in a
kernel of its own, `build` writes both files and tells when they have drifted from the source. `terms` and
`bibliography` read the words and sources of the course from `data/`, `links` links words in the notebooks,
`pages` makes the glossary and the bibliography.
`solution` and `stub` take one exercise's function straight from the source, for the tests of its checker.
"""

from kvcourse.notebooks.exercises import solution, stub

__all__ = ["solution", "stub"]
