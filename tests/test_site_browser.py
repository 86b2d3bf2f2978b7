"""The built site in a real browser: its navigation, its search, light and dark, on a screen and on a phone."""

from pathlib import Path

import pytest
from browser import chromium, console_errors, missing, served_folder, until

from kvcourse.site.build import build

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the site with two lessons."""
    folder = tmp_path_factory.mktemp("site")
    build(ROOT, folder, ["00", "03"])
    with served_folder(folder) as url:
        yield url


@pytest.fixture(scope="module")
def driver():
    with chromium(1440, 900) as driver:
        yield driver


@pytest.fixture
def reader(driver, site):
    """A browser on the front page, that must have complained of nothing by the end."""
    driver.get(site)
    yield driver
    assert console_errors(driver, site) == []


def find(reader, selector: str):
    return reader.find_element("css selector", selector)


def test_the_navigation_leads_to_a_lesson_and_on_to_the_next(reader, site):
    reader.find_element("link text", "0. Start here").click()
    until(lambda: reader.title == "0. Start here - kvcourse", 30, "the first lesson")
    find(reader, "a.next-page").send_keys("\n")  # a click would hit the page while it still scrolls
    until(lambda: reader.title == "3. Prefill and decode - kvcourse", 30, "the next lesson")
    assert reader.execute_script("return [...document.images].every(image => image.complete && image.naturalWidth > 0)")
    assert reader.execute_script("return document.querySelectorAll('math').length") == 1
    assert reader.execute_script("return document.querySelector('math').getBoundingClientRect().height") > 20


def test_the_search_finds_prefill(reader, site):
    box = find(reader, "input.sidebar-search")
    box.send_keys("prefill")
    box.submit()
    found = until(lambda: reader.find_elements("css selector", "ul.search li a"), 30, "a result of the search")
    pages = [link.get_attribute("href").split("?")[0].split("#")[0] for link in found]
    assert f"{site}notebooks/03_prefill_and_decode.html" in pages
    assert not [page for page in pages if "/instructor/" in page]
    reader.get(f"{site}search.html?q=nosuchwordatall")
    until(lambda: "did not match any documents" in find(reader, "article").text, 30, "the search to end")
    assert not reader.find_elements("css selector", "ul.search li a")


def test_dark_is_dark_and_is_kept(reader, site):
    def brightness(selector: str) -> float:
        """Of an element's background: 0 is black, 1 white."""
        color = reader.execute_script(f"return getComputedStyle(document.querySelector('{selector}')).backgroundColor")
        return sum(map(int, color[color.index("(") + 1 : -1].split(",")[:3])) / (3 * 255)

    assert brightness("body") > 0.9
    button = find(reader, ".content-icon-container .theme-toggle")
    for _ in range(3):  # auto, light, dark in turns
        if reader.execute_script("return document.body.dataset.theme") != "dark":
            button.click()
    assert brightness("body") < 0.2
    reader.get(f"{site}notebooks/00_start_here.html")
    assert brightness("body") < 0.2
    assert brightness(".cell_output img") == 1  # a figure is drawn on white
    reader.execute_script("localStorage.clear()")


@pytest.mark.parametrize("width", [1440, 1024, 390])
def test_no_page_is_wider_than_the_screen(reader, site, width):
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    reader.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    for name in ("index", "notebooks/03_prefill_and_decode", "package", "search"):
        reader.get(f"{site}{name}.html")
        root = "document.documentElement"
        assert reader.execute_script("return innerWidth") == width
        assert reader.execute_script(f"return {root}.scrollWidth - {root}.clientWidth") == 0, name
    reader.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
