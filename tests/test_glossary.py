"""The glossary: complete and sound, linked at first use without changing what is read, and built as a notebook."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from browser import TOKEN, chromium, jupyterlab, missing, until
from nbconvert.filters import markdown2html

import kvcourse as kv
from kvcourse.notebooks.bibliography import read_sources
from kvcourse.notebooks.build import build, drift, lesson_paths
from kvcourse.notebooks.links import link_terms
from kvcourse.notebooks.pages import read_pages
from kvcourse.notebooks.source import METADATA, read_notebooks, read_project
from kvcourse.notebooks.terms import Term, find, read_terms

ROOT = Path(__file__).resolve().parent.parent
TERMS = read_terms(ROOT / "data" / "glossary.toml")
SOURCES = sorted((ROOT / "notebooks" / "src").glob("*.py"))
LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)?glossary\.ipynb#cell-id=([^)]+)\)")
# What somebody who works on inference would look up.
EXPECTED = """
KV cache; prefill; decode; TTFT; ITL; TPOT; MHA; GQA; MQA; MLA; head; query; key; value; logit; softmax; RoPE;
sliding window; attention sink; block table; page; fragmentation; copy on write; preemption; continuous batching;
chunked prefill; prefix caching; roofline; arithmetic intensity; bandwidth; quantization; grid; scale; zero point;
group; outlier; GPTQ; AWQ; Hessian; perplexity; calibration; speculative decoding; tensor parallelism; token; batch;
throughput; latency; kernel; GGUF; NF4; QLoRA; SmoothQuant; all_reduce; disaggregated prefill; scheduler; hash; LRU
"""
COMMON = {
    "en": "the a an of is by in to",
    "fr": "le la les un une de des du en au que",
    "it": "il la lo le un una di che in",
}


# --- the entries ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [word.strip() for word in EXPECTED.replace("\n", " ").split(";")])
def test_a_word_that_one_would_look_up_is_there(word):
    assert word in find(TERMS, word).names["en"]


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
def test_an_entry_is_a_definition_in_three_languages(term):
    for language, text in term.texts.items():
        assert text[0].isupper() or text.startswith(("e to", "e à", "e elevato", "llama.cpp"))
        assert text.endswith((".", ".)")) and 20 < len(text) < 330
        assert 1 <= len(re.findall(r"[.:?](?= [A-ZÀ-Ý(]|\)?$)", text)) <= 4
        words = re.findall(r"\w+", text.lower())
        assert set(COMMON[language].split()) & set(words), f"{language}: {text}"
    assert len(set(term.texts.values())) == 3
    assert re.fullmatch(r"[\w -]+", term.name), "a heading with other signs has no sure anchor"


def test_no_word_means_two_entries_and_every_source_is_in_the_bibliography():
    words = [word.lower() for term in TERMS for word in (*term.names["en"], *term.forms)]
    assert not {word for word in words if words.count(word) > 1}
    keys = {source.key for source in read_sources(ROOT / "data" / "bibliography.toml")}
    assert not {term.source for term in TERMS if term.source} - keys


# What an entry must say where it used to say too much, or another thing: by name, in every language.
CORRECTED = {
    "ceiling": ("course another cache", "cours autre cache", "corso altro cache"),  # another program was faster
    "RoPE": ("only through distance", "entrent que distance", "entrano solo distanza"),  # contents count, too
    "speculative decoding": ("sampling distribution", "échantillonnage distribution", "campionamento distribuzione"),
    "prefix caching": ("running ended", "cours terminés", "corso finiti"),
    "perplexity": ("minus log probability", "moins logarithme probabilité", "meno logaritmo probabilità"),
    "SmoothQuant": ("large values", "grandes valeurs", "valori grandi"),
}
NOT_WORDS_FOR_IT = [
    ("recall", "fr", "mémorisation"),
    ("chat template", "it", "modello di conversazione"),  # that would be a model
    ("chunked prefill", "it", "prefill a blocchi"),  # a block is another thing
    ("SmoothQuant", "en", "loud"),
    ("SmoothQuant", "fr", "bruyant"),
    ("SmoothQuant", "it", "troppo forti"),
    ("ceiling", "en", "no program"),
]


@pytest.mark.parametrize("name", CORRECTED)
def test_an_entry_says_what_is_true(name):
    for text, wanted in zip(find(TERMS, name).texts.values(), CORRECTED[name], strict=True):
        assert not {word for word in wanted.split() if word not in text.lower()}, text


@pytest.mark.parametrize(("name", "language", "word"), NOT_WORDS_FOR_IT)
def test_an_entry_has_no_word_that_means_another_thing(name, language, word):
    entry = find(TERMS, name)
    assert word not in " ".join([*entry.names[language], entry.texts[language]])


GOOD = """
[[term]]
en = ["cat"]
fr = ["chat"]
it = ["gatto"]
notebook = "02"
text.en = "An animal."
text.fr = "Un animal."
text.it = "Un animale."
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", None),
        ('it = ["gatto"]\n', "", r"\['cat'\] must have a name and a text in en, fr, it, but lacks 'it'"),
        ('text.fr = "Un animal."', "", "lacks 'fr'"),
        ('text.fr = "Un animal."', 'text.fr = " "', r"has text = .* must be a text that is not blank in en, fr, it"),
        ('text.fr = "Un animal."', 'text.fr = "Un animal."\ntext.de = "Ein Tier."', "and in no other language"),
        ('"02"', '"2"', r"\['cat'\] has notebook = '2', which must be the number of the notebook .* such as '02'"),
        ('"02"', "2", r"\['cat'\] has notebook = 2, which must be the number"),
        ('notebook = "02"\n', "", "must name the notebook that introduces it"),
        ('["cat"]', '"cat"', "the entry 'cat' has en = 'cat', which must be a list of texts that are not blank"),
        ('["cat"]', '[""]', r"the entry \[''\] has en = \[''\], which must be a list of texts that are not blank"),
        ('["cat"]', "[1]", r"has en = \[1\], which must be a list of texts"),
        ('"02"', '"02"\nforms = "cats"', r"\['cat'\] has forms = 'cats', which must be a list of texts"),
        ('"02"', '"02"\neveryday = "no"', r"\['cat'\] has everyday = 'no', which must be true or false"),
        ('"02"', '"02"\nsource = 2', r"\['cat'\] has source = 2, which must be a key of the bibliography"),
        ('"02"', '"02"\nskip = ["2"]', r"\['cat'\] has skip = \['2'\], which must be a list of numbers like '02'"),
        (GOOD[GOOD.index("text.en") :], 'text = "x"', r"\['cat'\] has text = 'x', which must be a text"),
        (GOOD, "term = [1, 2]", r"term must be a list of tables, each begun by \[\[term\]\], not \[1, 2\]"),
        ("[[term]]", "[term]", "term must be a list of tables"),
        ("[[term]]", GOOD.replace('"cat"', '"a b"') + GOOD.replace('"cat"', '"a-b"') + "[[term]]", r"'a b', 'a-b'\]"),
        ('notebook = "02"', 'notebook = "02"\nsee = ["dog"]', r"'cat' refers to \['dog'\]"),
        ('notebook = "02"', 'notebook = "02"\nsee = ["cat"]', r"'cat' refers to \['cat'\]"),
        ('notebook = "02"', 'notebook = "02"\nform = ["cats"]', r"has unknown fields \['form'\]"),
        ("[[term]]", GOOD + "[[term]]", "has an English name twice"),
        ("[[term]]", "[[term", "is damaged"),
    ],
)
def test_what_is_wrong_in_an_entry_is_said(tmp_path, old, new, message):
    path = tmp_path / "glossary.toml"
    path.write_text(GOOD.replace(old, new, 1))
    if message is None:
        assert read_terms(path)[0].name == "cat"
        return
    with pytest.raises(ValueError, match=message):
        read_terms(path)


# --- asking --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("ttft", "TTFT"),
        ("Fenêtre glissante", "sliding window"),
        ("larghezza di banda della memoria", "memory bandwidth"),
    ]
    + [("time to first token", "TTFT"), ("attention", "attention"), ("clé", "key"), ("batch", "batch")],
)
def test_a_term_is_found_in_any_language(capsys, word, name):
    kv.glossary(word)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"en  {name}") and re.match(r"Notebook \d\d\.", last)


def test_an_unknown_word_is_answered_with_close_ones():
    with pytest.raises(ValueError, match="There is no 'prefil' in the glossary; close to it are: prefill"):
        kv.glossary("prefil")
    with pytest.raises(ValueError, match=r"There is no 'xyzzy' in the glossary; it has \d+ terms"):
        kv.glossary("xyzzy")


# --- linking: small texts ------------------------------------------------------------------------------------


def term(name, *forms, notebook="02", **fields):
    return Term({"en": (name,)}, {}, notebook, forms=forms, **fields)


WORDS = [
    term("KV cache", "cache"),
    term("prefill"),
    term("chunked prefill"),
    term("AWQ"),
    term("policy"),
    term("hash"),
    term("page", everyday=True),
    term("layer", everyday=True, notebook="01"),
    term("kernel", skip=("02",)),
]


def linked(*texts, number="02", page="g"):
    cells = [nbformat.v4.new_markdown_cell(text) for text in ("# Title with prefill", *texts)]
    return [cell.source for cell in link_terms(cells, WORDS, number, page)][1:]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("A prefill. A prefill.", "A [prefill](g#cell-id=prefill). A prefill."),
        ("Prefills begin.", "[Prefills](g#cell-id=prefill) begin."),
        ("Some **prefill** and *hashes*.", "Some **[prefill](g#cell-id=prefill)** and *[hashes](g#cell-id=hash)*."),
        ("Two policies.", "Two [policies](g#cell-id=policy)."),
        ("A KV\ncache, a kv cache.", "A [KV\ncache](g#cell-id=KV-cache), a kv cache."),
        (
            "- a KV-cache\n- a chunked\n  prefill",
            "- a [KV-cache](g#cell-id=KV-cache)\n- a [chunked\n  prefill](g#cell-id=chunked-prefill)",
        ),
        ("Chunked prefill, prefill.", "[Chunked prefill](g#cell-id=chunked-prefill), [prefill](g#cell-id=prefill)."),
        ("AWQ is not awq.", "[AWQ](g#cell-id=AWQ) is not awq."),
        ("awq, hashing, prefilled, re-hash, hash-like, my_cache", None),
        ("## A hash\n\n### Prefill", None),
        ("A hash\n======", None),
        ("Code: `a hash`, ``a `cache` ``.", None),
        ("```text\na hash\n```\n\n    a cache\n", None),
        ("A [link on hash](x) and ![a cache](y) and [![a prefill](z)](w).", None),
        ("See https://example.org/hash and <https://example.org/cache>.", None),
        ("$x = \\text{hash}$ and $$\\text{prefill of }\nx$$", None),
        ("<details><summary>A hash</summary>The cache.</details>", None),
        ("A <b title='hash'>word</b>.", None),
        ("| hash | cache |\n|---|---|\n| prefill | x |", None),
        ("Layers and kernels.", None),
        ("[a cache][ref], [hash][].\n\n[ref]: x\n[hash]: y", None),
        ("[cache], ![hash].\n\n[cache]: x\n[hash]: y", None),
        ("A [cache] without an address.", "A [[cache](g#cell-id=KV-cache)] without an address."),
        ("An <a href='x'>address of\nthe cache</a> and <CODE>a hash</CODE>.", None),
        ("See [x](http://a(b)cache) and [y](<a) hash>).", None),
        ("See www.cache.org and &hash;.", None),
        ("```\na\u2028\u2028hash\n```\nEnd", None),
        ("```\na\x0c\x0chash\n```\nEnd", None),
        ("```\na\x1c\x1chash\n```\nEnd", None),
        ("A\u2028B.\n\nC.\r\n\r\nA hash.", "A\u2028B.\n\nC.\r\n\r\nA [hash](g#cell-id=hash)."),
        ("A page.", "A [page](g#cell-id=page)."),
    ],
)
def test_what_is_linked_and_what_is_left_alone(text, wanted):
    assert linked(text) == [text if wanted is None else wanted]


def test_once_in_a_notebook_and_everyday_words_in_their_own_alone():
    assert linked("No word.", "A hash.", "A hash.") == ["No word.", "A [hash](g#cell-id=hash).", "A hash."]
    assert linked("A page in a layer of a kernel.", number="01") == [
        "A page in a [layer](g#cell-id=layer) of a [kernel](g#cell-id=kernel)."
    ]


# --- linking: the course -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built():
    """Every notebook as it is built with the glossary, and without."""
    project = read_project(ROOT)
    plain = project._replace(terms=())
    return {path.stem: (read_notebooks(path, project), read_notebooks(path, plain)) for path in SOURCES}


def prose(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]


class Words(HTMLParser):
    """The text of a page, without tags and addresses."""

    def __init__(self, html):
        super().__init__()
        self.text = ""
        self.feed(html)

    def handle_data(self, data):
        self.text += data


def rendered(markdown):
    return " ".join(Words(markdown2html(markdown)).text.split())


def test_taking_the_links_out_gives_what_was_written(built):
    for with_links, without in built.values():
        for one, other in zip(with_links, without, strict=True):
            assert [LINK.sub(r"\1", text) for text in prose(one)] == prose(other)
            assert [cell for cell in one.cells if cell.cell_type == "code"] == [
                cell for cell in other.cells if cell.cell_type == "code"
            ]
            assert [cell.id for cell in one.cells] == [cell.id for cell in other.cells]


def test_what_a_reader_sees_is_the_same(built):
    for with_links, without in built.values():
        pairs = [
            pair for pair in zip(prose(with_links.learner), prose(without.learner), strict=True) if pair[0] != pair[1]
        ]
        assert pairs
        for one, other in pairs:
            assert rendered(one) == rendered(other)


def test_a_link_in_the_wrong_place_would_be_seen():
    assert rendered("A [hash](g#cell-id=hash) here") == rendered("A hash here")
    assert rendered("`A [hash](g#cell-id=hash) here`") != rendered("`A hash here`")


def test_each_link_leads_to_an_entry_once_in_a_notebook_and_each_entry_is_led_to(built):
    headings = {term.anchor for term in TERMS}
    used = set()
    for name, (with_links, _) in built.items():
        for notebook, page in zip(with_links, ("glossary.ipynb", "../glossary.ipynb"), strict=True):
            text = "\n".join(prose(notebook))
            anchors = [anchor for _, anchor in LINK.findall(text)]
            assert len(set(anchors)) == len(anchors) and set(anchors) <= headings, name
            assert len(re.findall(rf"\]\({re.escape(page)}#cell-id=", text)) == len(anchors)
            assert 5 <= len(anchors) <= 45, "a page must neither lack links nor drown in them"
        used |= set(anchors)
    assert headings == used


def test_a_text_of_a_batch_is_no_row_and_a_batch_is_defined_where_an_exercise_needs_it(built):
    learner = built["02_kv_cache"][0].learner
    [exercise] = [text for text in prose(learner) if "### Exercise: next_positions" in text]
    assert "batch" in exercise and "row i" not in exercise.lower()
    linked = [text for text in prose(learner) if "#cell-id=batch)" in text]
    assert "several texts" in linked[0].lower() and prose(learner).index(linked[0]) < prose(learner).index(exercise)


def test_a_term_occurs_in_the_notebook_that_is_said_to_introduce_it(built):
    texts = {name[:2]: "\n".join(cell.source for cell in pair[1].learner.cells) for name, pair in built.items()}
    missing = []
    for entry in TERMS:
        words = [re.escape(word).replace(r"\ ", r"[\s-]+") for word in (*entry.names["en"], *entry.forms)]
        if not re.search("|".join(words), texts[entry.notebook], re.IGNORECASE):
            missing.append((entry.name, entry.notebook))
    assert not missing


# --- the page ------------------------------------------------------------------------------------------------

SOURCE = '# %% [markdown]\n# # Tiny\n\n# %% tags=["setup"]\n# SETUP\n\n# %% [markdown]\n# A cat sat.\n'


@pytest.fixture
def course(tmp_path):
    (tmp_path / "notebooks" / "src").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    project = '[project]\nversion = "0.1.0"\n[project.urls]\nRepository = "https://github.com/owner/repo"\n'
    (tmp_path / "pyproject.toml").write_text(project)
    (tmp_path / "notebooks" / "src" / "02_tiny.py").write_text(SOURCE)
    (tmp_path / "data" / "glossary.toml").write_text(GOOD)
    build(tmp_path, run=False)
    return tmp_path


def test_the_page_has_a_heading_for_each_term_and_indexes_in_two_languages():
    page = read_pages(ROOT, METADATA)["glossary"]
    nbformat.validate(page)
    assert {cell.cell_type for cell in page.cells} == {"markdown"}
    text = "\n".join(cell.source for cell in page.cells)
    assert re.findall(r"^### (.+)$", text, re.M) == [term.name for term in TERMS]
    assert [cell.id for cell in page.cells[4:]] == [term.anchor for term in TERMS]
    french, italian = (
        next(cell.source for cell in page.cells if title in cell.source) for title in ("français\n", "italiani\n")
    )
    assert "[étalonnage](#calibration)" in french and "[finestra scorrevole](#sliding-window)" in italian
    assert french.index("[écrêtage]") < french.index("[FLOP]") < french.index("[zero point]")


def test_the_page_is_built_and_its_drift_reported(course):
    path = course / "notebooks" / "glossary.ipynb"
    assert (
        path.is_file()
        and "A [cat](glossary.ipynb#cell-id=cat) sat." in (course / "notebooks" / "02_tiny.ipynb").read_text()
    )
    assert (
        "A [cat](../glossary.ipynb#cell-id=cat) sat."
        in (course / "notebooks" / "solutions" / "02_tiny.ipynb").read_text()
    )
    assert not [found for found in drift(course) if "without running" not in found]
    words = course / "data" / "glossary.toml"
    words.write_text(GOOD.replace("An animal.", "A pet."))
    [found] = [found for found in drift(course) if "without running" not in found]
    assert (
        found.startswith(str(path.relative_to(course))) and "the source differs at glossary, cell 5 (### cat)" in found
    )
    assert build(course, run=False)[-1] == path
    assert path not in build(course, run=False), "what is up to date is not written again"
    path.unlink()
    assert "glossary.ipynb: is missing" in drift(course)[-1]


def test_an_entry_of_a_notebook_that_is_not_there_is_refused_before_anything_is_built(course):
    (course / "data" / "glossary.toml").write_text(GOOD.replace('"02"', '"03"'))
    before = {path: path.read_bytes() for path in course.rglob("*.ipynb")}
    with pytest.raises(ValueError, match="notebook 03 introduces 'cat'; there is none"):
        build(course, run=False)
    (course / "data" / "glossary.toml").write_text(GOOD.replace('"02"', '"02"\nskip = ["99"]'))
    with pytest.raises(ValueError, match="skips 'cat' in notebook 99; there is none"):
        build(course, run=False)
    assert {path: path.read_bytes() for path in course.rglob("*.ipynb")} == before


def test_a_page_without_code_is_no_lesson_and_nbval_is_content_with_it(course):
    assert [path.name for path in lesson_paths(course / "notebooks")] == ["02_tiny.ipynb"]
    pages = course / "pages"
    pages.mkdir()
    shutil.copy(course / "notebooks" / "glossary.ipynb", pages)
    (pages / "test_something.py").write_text("def test_something():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--nbval", str(pages)]
    done = subprocess.run(command, cwd=pages, capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


IN_VIEW = """
const shown = [...document.querySelectorAll("h3")].filter(one => one.offsetParent);
const heading = shown.find(one => one.innerText.startsWith(arguments[0]));
const place = heading && heading.getBoundingClientRect();
return Boolean(place) && place.top >= 0 && place.bottom <= innerHeight;
"""
CLICK = "[...document.querySelectorAll('a')].find(one => one.innerText == arguments[0]).click()"
LINKED = "return [...document.querySelectorAll('a')].some(one => one.innerText == arguments[0])"


@pytest.mark.slow
def test_a_click_in_jupyterlab_shows_the_entry(tmp_path):
    """The first one, too, which opens the page."""
    if missing():
        pytest.skip(missing())
    page = read_pages(ROOT, METADATA)["glossary"]
    page.cells = page.cells[:3] + [cell for cell in page.cells if cell.id in ("AWQ", "GQA", "kernel", "LRU", "RoPE")]
    text = "The [rotary embedding](glossary.ipynb#cell-id=RoPE)."
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)], metadata=METADATA)
    for folder in (lab := tmp_path / "lab", scratch := tmp_path / "scratch"):
        folder.mkdir()
    nbformat.write(page, lab / "glossary.ipynb")
    nbformat.write(notebook, lab / "some.ipynb")
    with jupyterlab(lab, scratch) as url, chromium() as driver:
        driver.get(f"{url}lab/tree/some.ipynb?token={TOKEN}&reset")
        until(lambda: driver.execute_script(LINKED, "rotary embedding"), 120, "the notebook")
        assert not driver.execute_script(IN_VIEW, "RoPE")
        driver.execute_script(CLICK, "rotary embedding")
        until(lambda: driver.execute_script(IN_VIEW, "RoPE"), 60, "the entry")
