"""One notebook in JupyterLab as a learner meets it: opened, run from its menu, its widgets moved by hand.

Everything is read off the page itself, as it is shown.
"""

import json
import urllib.request

from browser import TOKEN, until
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

SCROLLER = ".jp-WindowedPanel-outer"
PROMPTS = ".jp-Notebook .jp-CodeCell .jp-InputPrompt"
BAD_OUTPUT = (
    ".jp-OutputArea [data-mime-type='application/vnd.jupyter.error'],"
    ".jp-OutputArea [data-mime-type='application/vnd.jupyter.stderr'], .jp-Dialog"
)
TEXTS = "return [...document.querySelectorAll(arguments[0])].map(part => part.textContent.trim())"
# What is wider than the space it has. Code may be: an editor scrolls by itself.
TOO_WIDE = """
const parts = [document.documentElement, document.querySelector(".jp-WindowedPanel-outer"),
               ...document.querySelectorAll(".jp-RenderedMarkdown, .jp-OutputArea-output")];
const wide = parts.filter(part => part.scrollWidth > part.clientWidth + 1)
                  .map(part => `${part.scrollWidth} px in ${part.clientWidth}: ${part.textContent.slice(0, 80)}`);
for (const image of document.querySelectorAll(".jp-OutputArea img")) {
    const inner = image.getBoundingClientRect(), outer = image.closest(".jp-OutputArea").getBoundingClientRect();
    if (inner.right > outer.right + 1) wide.push(`a figure of ${inner.width} px in ${outer.width}: ${image.alt}`);
}
return wide;
"""
UNSEEN = """
return [...document.querySelectorAll(".jp-OutputArea img")]
    .filter(image => image.complete && !image.naturalWidth).map(image => image.alt || image.src.slice(0, 80));
"""
SHOWN = """
return [...document.querySelectorAll(".jp-OutputArea .widget-vbox .widget-html-content")]
    .map(part => part.querySelector("img")?.src ?? part.textContent);
"""


class NotebookPage:
    """The page of one notebook with a title: `name` with its ending, in the JupyterLab at `url`, shown by `driver`."""

    def __init__(self, driver, url: str, name: str, code_cells: int):
        self.driver, self.url, self.code_cells = driver, url, code_cells
        driver.get(f"{url}lab/tree/{name}?token={TOKEN}&reset")
        until(self._ready, 120, f"{name} and its kernel")

    def close(self) -> None:
        """Leave the page, forget what the console said, and shut the kernel down: the memory is for the next one."""
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        for session in json.load(self._ask("api/sessions")):
            self._ask(f"api/sessions/{session['id']}", "DELETE").close()

    def _ask(self, path: str, method: str = "GET"):
        headers = {"Authorization": f"token {TOKEN}"}
        return urllib.request.urlopen(urllib.request.Request(self.url + path, method=method, headers=headers))

    def _ready(self) -> bool:
        """The title is shown, the kernel waits for work, and nothing lies over the page any more."""
        assert not self._texts(".jp-Dialog"), f"JupyterLab asks {self._texts('.jp-Dialog')}"
        return (
            bool(self._texts(".jp-Notebook h1")) and self._status() == "idle" and not self._texts("#jupyterlab-splash")
        )

    def _texts(self, selector: str) -> list[str]:
        return self.driver.execute_script(TEXTS, selector)

    def _status(self) -> str | None:
        indicator = "return document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status"
        return self.driver.execute_script(indicator)

    def run_all(self, seconds: float) -> None:
        """Choose Run > Run All Cells, and wait until every cell has its number or one has failed."""
        self.driver.find_element(By.XPATH, "//li[contains(@class, 'lm-MenuBar-item')][contains(., 'Run')]").click()
        item = "li.lm-Menu-item[data-command='runmenu:run-all']"
        until(lambda: self.driver.find_elements(By.CSS_SELECTOR, item), 30, "the menu Run")[0].click()
        until(self._ended, seconds, "all cells to run", lambda: f"The cells are at {self._texts(PROMPTS)}.")

    def _ended(self) -> bool:
        """JupyterLab adds cells out of sight when it finds the time, so that some may come after they have run."""
        numbered = [text.strip("[]:").isdigit() for text in self._texts(PROMPTS)]
        complete = len(numbered) == self.code_cells and all(numbered)
        return self._status() == "idle" and (complete or bool(self.bad_outputs()))

    def bad_outputs(self) -> list[str]:
        """Texts of tracebacks, of what was written to stderr, and of dialogs in the way."""
        return self._texts(BAD_OUTPUT)

    def too_wide(self) -> list[str]:
        """What sticks out of its place at the present width, or makes a horizontal scroll bar appear."""
        return self.driver.execute_script(TOO_WIDE)

    def broken_images(self) -> list[str]:
        """Figures among the outputs that the browser cannot show."""
        return self.driver.execute_script(UNSEEN)

    def controls(self) -> list:
        """Every control of every explorer from top to bottom, then the players: one that runs moves the others."""
        kinds = ", ".join(f".widget-{kind}" for kind in MOVES)
        found = self.driver.find_elements(By.CSS_SELECTOR, f".jp-OutputArea :is({kinds})")
        return sorted(found, key=lambda control: kind_of(control) == "play")

    def figures(self) -> list[str]:
        """The figures of all explorers as data; an error shown in place of one is raised."""
        shown = self.driver.execute_script(SHOWN)
        errors = [text for text in shown if not text.startswith("data:image/png;base64,")]
        assert not errors, f"an explorer shows {errors}"
        return shown

    def move(self, control, seconds: float = 60) -> None:
        """Move a control as a learner would, and wait until a figure has changed."""
        before, kind, name = self.figures(), kind_of(control), control.text
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", control)
        MOVES[kind](control)
        until(lambda: self.figures() != before, seconds, f"a figure to change with the {kind} {name!r}")
        if kind == "play":
            _press(control, "stop")


def kind_of(control) -> str:
    return next(kind for kind in MOVES if f"widget-{kind}" in control.get_attribute("class").split())


def _slide(control) -> None:
    """To the end that is farther away."""
    handle = control.find_element(By.CSS_SELECTOR, "[role=slider]")
    low, now, high = (float(handle.get_attribute(f"aria-value{which}")) for which in ("min", "now", "max"))
    handle.send_keys(Keys.END if high - now >= now - low else Keys.HOME)


def _choose(control) -> None:
    options = Select(control.find_element(By.TAG_NAME, "select"))
    chosen = options.options.index(options.first_selected_option)
    options.select_by_index((chosen + 1) % len(options.options))


def _tick(control) -> None:
    control.find_element(By.TAG_NAME, "input").click()


def _paste(control) -> None:
    control.find_element(By.TAG_NAME, "textarea").send_keys(CONFIG_JSON, Keys.TAB)


def _press(control, icon: str = "play") -> None:
    control.find_element(By.CSS_SELECTOR, f"button:has(.fa-{icon})").click()


MOVES = {"slider": _slide, "dropdown": _choose, "checkbox": _tick, "textarea": _paste, "play": _press}
# A made-up model, for the explorer that takes a pasted config.json.
CONFIG_JSON = json.dumps(
    {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
)
