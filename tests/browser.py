"""A real browser for tests: Chromium driven by Selenium, and the two servers whose pages it opens.

    with chromium() as driver, served_folder(html) as url:
        driver.get(url)
        assert console_errors(driver, url) == []

Debian's packages `chromium` and `chromium-driver` are enough; nothing is downloaded.
"""

import json
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from kvcourse.workshop import footprint

NAMES = ("chromium", "google-chrome", "chromium-browser")
TOKEN = "browser-test"
# What JupyterLab would ask the learner at its first start, or the network.
NO_NEWS = {"fetchNews": "false", "checkForUpdates": False}


def missing() -> str | None:
    """Why no browser can be started here, in a sentence; None when one can."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return 'selenium is not installed: pip install -e ".[test]"'
    if shutil.which("chromedriver") is None:
        return "there is no chromedriver on the PATH (Debian's package chromium-driver has it)"
    return None if browser_of(shutil.which("chromedriver")) else f"no {', '.join(NAMES)} of chromedriver's version"


def browser_of(chromedriver: str) -> str | None:
    """The first browser on the PATH that has the major version of this driver."""
    browsers = filter(None, map(shutil.which, NAMES))
    return next((browser for browser in browsers if major(browser) == major(chromedriver)), None)


def major(program: str) -> str | None:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60).stdout
    version = re.search(r"(\d+)\.\d+\.\d+", said)
    return version and version[1]


@contextmanager
def chromium(width: int = 1440, height: int = 1200):
    """A headless browser as a Selenium driver, its window of this many pixels; it keeps what the console says."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    chromedriver = shutil.which("chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser_of(chromedriver)
    # --no-sandbox: root may not start one. --disable-dev-shm-usage: in a container /dev/shm is too small.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size={width},{height}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    try:
        yield driver
    finally:
        driver.quit()


@contextmanager
def served_folder(folder: Path):
    """The address under which a server of its own shows the HTML files of `folder`."""
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            yield re.search(r"http://\S+/", server.stdout.readline())[0]
        finally:
            server.terminate()


@contextmanager
def jupyterlab(notebooks: Path, scratch: Path, **variables: str):
    """The address of a JupyterLab on the folder `notebooks`, ending in "/"; TOKEN opens it.

    All that it keeps (settings, workspaces, kernels' files) goes to `scratch`; `variables` are added to the
    environment that its kernels inherit. Every kernel ends with it.
    """
    settings = scratch / "jupyterlab_settings_dir" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(NO_NEWS), encoding="utf-8")
    own = {"KVCOURSE_RESULTS": str(scratch / "results")} | variables
    with footprint.jupyterlab(notebooks, scratch, TOKEN, **own) as (_, address):
        yield f"{address}/"


def until(condition, seconds: float, what: str, explain=lambda: ""):
    """The first true value of `condition()`; an AssertionError naming `what` after so many seconds."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {seconds} s for {what}. {explain()}"
        time.sleep(0.1)
    return value


def console_errors(driver, url: str) -> list[str]:
    """Errors in the browser's console since the last call.

    Left out are files of other hosts than that of `url`, and the icon that a browser asks every host for.
    """
    severe = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    ours = re.compile(rf"{re.escape(url)}(?!favicon\.ico)")
    return [entry["message"] for entry in severe if entry["source"] != "network" or ours.match(entry["message"])]


def resize(driver, width: int, height: int = 1200) -> None:
    """Give the page this width, and wait until it is laid out anew."""
    driver.set_window_size(width, height)
    until(lambda: driver.execute_script("return innerWidth") == width, 30, f"a window {width} px wide")
    painted(driver)


def painted(driver) -> None:
    """Wait until the browser has drawn what it was last told, twice over: the first frame may start new work."""
    driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def photograph(driver, folder: Path, name: str, scroller: str = ":root") -> list[Path]:
    """Screenshots NAME-00.png, NAME-01.png, ... of all that can be scrolled to, from top to bottom.

    `scroller` is the CSS selector of what scrolls. One picture overlaps the next by a twentieth.
    """
    part = "const part = document.querySelector(arguments[0]);"
    driver.execute_script(f"{part} part.scrollTop = 0", scroller)
    files = []
    while True:
        painted(driver)
        files.append(folder / f"{name}-{len(files):02}.png")
        driver.save_screenshot(str(files[-1]))
        moved = f"{part} const top = part.scrollTop; part.scrollTop += 0.95 * part.clientHeight; return part.scrollTop"
        if not driver.execute_script(f"{moved} - top", scroller) > 1:
            return files


@contextmanager
def explained(driver, folder: Path, name: str):
    """Add to the message of a failure a screenshot's name and the text that stands on the page."""
    try:
        yield
    except Exception as error:
        picture = folder / f"{name}-failed.png"
        driver.save_screenshot(str(picture))
        text = driver.execute_script("return document.body.innerText")
        raise AssertionError(f"{error}\nScreenshot: {picture}\nThe page says:\n{text}") from error
