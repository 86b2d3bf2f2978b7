"""The texts that quality is measured on: what they are, and that they stay so."""

from hashlib import sha256

import pytest

from kvcourse.evaluation import TEXTS, evaluation_text

DIGESTS = {"evaluation": "e5272087863a785f", "calibration": "bd27640f10d7a12a"}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_stays_as_it_is(name):
    """Figures measured on another text cannot be compared with earlier ones."""
    assert sha256(evaluation_text(name).encode()).hexdigest()[:16] == DIGESTS[name]


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_plain_prose(name):
    text = evaluation_text(name)
    assert len(text.split()) > 5000
    assert not set("|{}<>$\\`\t") & set(text)
    assert text.endswith(".\n") and "\n\n\n" not in text


def test_no_paragraph_is_in_both():
    one, other = (set(evaluation_text(name).split("\n\n")) for name in TEXTS)
    assert not one & other and len(one) > 100


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="There is no text 'test'; choose one of evaluation, calibration"):
        evaluation_text("test")
