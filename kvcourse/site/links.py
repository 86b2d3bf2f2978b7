"""Where the links of the course's texts lead on the site, and the names by which headings are linked."""

import posixpath
import re
from urllib.parse import quote, unquote, urlsplit

from kvcourse.site.pages import LESSONS, Page, Site


def address(link: str, page: Page, site: Site) -> str:
    """What `link`, as it stands in the page's source, is on the site: another page, or else the file in the repository.

    The learner's and the worked notebook are one page. Raises `ValueError` where the link leads to nothing.
    """
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or not parts.path:
        return link
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page.source), unquote(parts.path)))
    anchor = parts.fragment.removeprefix("cell-id=")  # how notebooks call an entry of the glossary, as its heading
    fragment = f"#{anchor}" if anchor else ""
    shown = {other.source: other.name for other in site.pages}
    shown |= {f"{other.name}.ipynb": other.name for other in site.pages if other.section == LESSONS}
    if path in shown:
        return posixpath.relpath(f"{shown[path]}.html", posixpath.dirname(page.name) or ".") + fragment
    if path.startswith(("..", "/")) or not (site.course / path).exists():
        raise ValueError(f"{page.source} links to {link}, which is not in the course")
    kind = "tree" if (site.course / path).is_dir() else "blob"
    return f"{site.repository}/{kind}/main/{quote(path)}{fragment}"


def anchors(heading: str) -> list[str]:
    """The names that links give a heading: GitHub's ("kv-cache"), for pages, and JupyterLab's ("KV-cache")."""
    return [github_anchor(heading), jupyterlab_anchor(heading)]


def github_anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def jupyterlab_anchor(heading: str) -> str:
    return heading.strip().replace(" ", "-")
