"""What a reader of a built site would run into: links that lead nowhere, files that come from the network, figures
without words."""

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup

ELSEWHERE = r"(url\(|@import)\s*[\"']?(https?:)?//"
LOADED = {"img": "src", "script": "src", "link": "href", "source": "src", "iframe": "src"}


def read_page(file: Path) -> BeautifulSoup:
    return BeautifulSoup(file.read_text(encoding="utf-8"), "html.parser")


def faults(site: Path) -> list[str]:
    """One sentence for each fault of any page."""
    pages = {file.resolve(): read_page(file) for file in site.rglob("*.html")}
    ids = {file: {tag["id"] for tag in page.find_all(id=True)} for file, page in pages.items()}
    found = []
    for file, page in pages.items():
        name = file.relative_to(site.resolve()).as_posix()
        for tag in page.find_all(["a", *LOADED]):
            link = tag.get(LOADED.get(tag.name, "href"))
            if link:
                found += [f"{name}: {fault}" for fault in link_faults(link, tag, file, ids)]
        found += [
            f"{name}: no alt text for {tag['src']}" for tag in page.find_all("img") if not tag.get("alt", "").strip()
        ]
    styles = {file.name: file.read_text(encoding="utf-8") for file in site.rglob("*.css")}
    return found + [f"{name}: loads from elsewhere" for name, text in styles.items() if re.search(ELSEWHERE, text)]


def link_faults(link: str, tag, file: Path, ids: dict[Path, set[str]]) -> list[str]:
    parts = urlsplit(link)
    if parts.scheme == "data":
        return []
    if parts.scheme or parts.netloc:
        outward = tag.name == "a" and parts.scheme in ("https", "http", "mailto")
        return [] if outward else [f"{link} is loaded from elsewhere"]
    target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    if not target.is_file():
        return [f"{link} leads nowhere"]
    fragment = unquote(parts.fragment)
    return [f"{link}: no such place"] if fragment and target in ids and fragment not in ids[target] else []
