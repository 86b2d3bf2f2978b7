"""What Sphinx does for this site beyond its own: links into the course, pages that need no network, formulas."""

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util import logging

from kvcourse.site.links import address, anchors

log = logging.getLogger(__name__)


def setup(app) -> dict:
    app.add_config_value("kvcourse_site", None, "env")
    app.add_html_math_renderer("mathml", (write_formula, None), (write_formula, None))
    app.connect("doctree-read", adapt)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def adapt(app, doctree: nodes.document) -> None:
    """Change the text of one page, just read, to what the site needs."""
    site = app.config.kvcourse_site
    page = next(page for page in site.pages if page.name == app.env.docname)
    for link in doctree.findall(nodes.reference):
        if "refuri" in link:
            try:
                link["refuri"] = address(link["refuri"], page, site)
            except ValueError as error:
                log.warning(str(error))
    for image in list(doctree.findall(nodes.image)):
        if "://" in image["uri"]:  # a badge: its words say it too, and need no network
            image.replace_self(nodes.inline("", image.get("alt", ""), classes=["badge"]))
    taken = set(doctree.ids)
    for section in doctree.findall(nodes.section):
        names = set(anchors(section.next_node(nodes.title).astext())) - taken
        section["ids"] += sorted(names)
        taken |= names


def write_formula(translator, node: nodes.math | nodes.math_block) -> None:
    """MathML, which browsers show without a library."""
    text = node.astext()
    formula = convert(text, display="block" if isinstance(node, nodes.math_block) else "inline")
    if "\\" in formula:  # a command that it does not know stands there as it was
        log.warning(f"no MathML for the formula {text!r}")
    translator.body.append(formula)
    raise nodes.SkipNode
