"""Build the site: Sphinx run over the course's pages, and the result put into a folder."""

import io
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from kvcourse.site.pages import Page, Site, find_site, write_sources

NEEDED = ("furo", "latex2mathml", "myst_nb", "sphinx")
MARK = ".kvcourse-site"  # a folder that holds this file is a former site, and may be replaced


def build(course: Path, output: Path, names=()) -> list[Page]:
    """Write the site of a course into the folder `output` and return its pages.

    The folder is made; a former site in it is replaced once the new one is whole. Raises `ValueError` where it holds
    anything else, `RuntimeError` where a library is missing, and with what Sphinx finds wrong in a page.
    """
    require_libraries()
    require_free(output)
    site = find_site(course, names)
    with tempfile.TemporaryDirectory(prefix="kvcourse-site-") as scratch:
        html = Path(scratch, "html")
        write_sources(site, Path(scratch, "sources"))
        run_sphinx(site, Path(scratch, "sources"), html)
        replace(output, html)
    return site.pages


def require_libraries() -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        command = 'pip install -c constraints.txt -e ".[site]"'
        raise RuntimeError(f"The site is built with {', '.join(missing)}, not installed here: {command}")


def require_free(output: Path) -> None:
    """`output`, made if need be, is a folder that a site may be written into, else `ValueError` or `OSError`."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file, and a site is a folder: give another with --output.")
    if output.is_dir() and any(output.iterdir()) and not (output / MARK).is_file():
        raise ValueError(f"{output} holds files that are no former site: give an empty or new folder with --output.")
    output.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=output).close()


def run_sphinx(site: Site, sources: Path, html: Path) -> None:
    """HTML of the pages in `sources`. Raises `RuntimeError` for any warning: it is a fault of a page."""
    from sphinx.application import Sphinx
    from sphinx.util.console import nocolor
    from sphinx.util.docutils import docutils_namespace, patch_docutils

    nocolor()
    warnings = io.StringIO()
    with patch_docutils(), docutils_namespace():
        Sphinx(
            srcdir=sources,
            confdir=Path(__file__).parent,  # where conf.py is
            outdir=html,
            doctreedir=html.with_name("doctrees"),
            buildername="html",
            confoverrides={"kvcourse_site": site},
            status=None,
            warning=warnings,
        ).build(force_all=True)
    faults = warnings.getvalue().replace(f"{sources}/", "").strip()
    if faults:
        raise RuntimeError(f"The site was not built:\n{faults}")


def replace(output: Path, html: Path) -> None:
    for old in output.iterdir():
        shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    (output / MARK).touch()
    shutil.copytree(html, output, dirs_exist_ok=True)
