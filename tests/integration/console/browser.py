"""Headless Chromium for tests of the console, and chats that produce data for it."""

import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.expected_conditions import alert_is_present
from selenium.webdriver.support.ui import WebDriverWait
from tests.cluster.processes import DEADLINE_S

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--force-device-scale-factor=1",
)  # fmt: skip
requires_chromium = pytest.mark.skipif(
    shutil.which("chromium") is None or shutil.which("chromedriver") is None,
    reason="no `chromium` and `chromedriver`; on Debian: apt-get install chromium chromium-driver",
)
PICTURES = os.environ.get("CONSOLE_PICTURES", "")
"""Directory for the screenshots of the tests; empty: none."""
DESKTOP, PHONE = (1360, 940), (390, 844)


class Browser:
    """One page."""

    def __init__(self, folder: Path, url: str) -> None:
        """`folder`: an empty directory for the profile."""
        options = Options()
        for flag in (*FLAGS, f"--user-data-dir={folder}", "--window-size={},{}".format(*DESKTOP)):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        self._url = url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.driver.quit()

    def view(self, path: str, *, size: tuple[int, int] = DESKTOP, theme: str = "light") -> None:
        """Open a view of the console as a new page, in a size and a color theme."""
        self.open(f"{self._url}/console/#/{path}", size=size, theme=theme)
        self.until(lambda: self.one("main h1"), f"the view {path} has no title")

    def open(self, url: str, *, size: tuple[int, int] = DESKTOP, theme: str = "light") -> None:
        """Open an address as a new page, in a size and a color theme."""
        width, height = size
        command = self.driver.execute_cdp_cmd
        command(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        command("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]})
        self.driver.get("about:blank")
        self.driver.get(url)

    def one(self, selector: str) -> WebElement | None:
        """Return the first element, None without one."""
        found = self.driver.find_elements(By.CSS_SELECTOR, selector)
        return found[0] if found else None

    def all(self, selector: str) -> list[WebElement]:
        """Return all elements."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def named(self, text: str, selector: str = "button, a") -> WebElement:
        """Return the element with that text."""
        script = (
            "return [...document.querySelectorAll(arguments[0])].find((one) => one.innerText.trim() === arguments[1])"
        )
        found = self.driver.execute_script(script, selector, text)
        assert found is not None, f"no element {text!r}\n{self.text('body')}"
        return found

    def click(self, text: str, selector: str = "button, a") -> None:
        """Click the element with that text, again if it was drawn again in between."""

        def clicked() -> bool:
            self.named(text, selector).click()
            return True

        self.until(clicked, f"{text!r} cannot be clicked")

    def text(self, selector: str = "main") -> str:
        """Return the visible text of an element."""
        return str(self.driver.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def until(self, condition: Callable[[], Any], message: str) -> Any:
        """Return the result of the condition once it is true; elements that were drawn again meanwhile do not matter."""
        from selenium.common.exceptions import StaleElementReferenceException

        wait = WebDriverWait(self.driver, DEADLINE_S, 0.1, ignored_exceptions=[StaleElementReferenceException])
        return wait.until(lambda _: condition(), f"{message}\n{self.text('body')}")

    def accept(self) -> None:
        """Accept the page's question once it is shown."""
        WebDriverWait(self.driver, DEADLINE_S, 0.1).until(alert_is_present(), "no question is shown").accept()

    def press(self, *keys: str) -> WebElement:
        """Press keys one after the other, and return the element that has the focus."""
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)
        return self.driver.switch_to.active_element

    def tab_to(self, is_wanted: Callable[[WebElement], bool], limit: int = 60) -> WebElement:
        """Press Tab until the focus is on the wanted element."""
        for _ in range(limit):
            if is_wanted(found := self.press(Keys.TAB)):
                return found
        raise AssertionError("the keyboard does not reach the element")

    def picture(self, name: str) -> None:
        """Write a screenshot of the page if screenshots are enabled."""
        if PICTURES:
            self.driver.save_screenshot(str(Path(PICTURES) / f"console-{name}.png"))

    def errors(self) -> list[str]:
        """Return the error messages of the page's console, and clear them."""
        return [one["message"] for one in self.driver.get_log("browser") if one["level"] in ("SEVERE", "WARNING")]

    def requested(self) -> set[str]:
        """Return the addresses that were requested since the last call."""
        import json

        found = set()
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.add(str(message["params"]["request"]["url"]))
        return found


class Chats:
    """Threads that send chats one after the other, from a fixed random seed, until they are stopped."""

    def __init__(self, url: str, model: str, count: int = 3, headers: dict[str, str] | None = None) -> None:
        self._ending = threading.Event()
        work = [threading.Thread(target=self._run, args=(url, model, seed, headers or {})) for seed in range(count)]
        self._threads = work

    def __enter__(self) -> Self:
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ending.set()
        for one in self._threads:
            one.join(DEADLINE_S)

    def _run(self, url: str, model: str, seed: int, headers: dict[str, str]) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=url, timeout=DEADLINE_S, headers=headers) as client:
            while not self._ending.is_set():
                system = f"prefix {rng.randrange(4)} " * (30 + 20 * rng.randrange(4))
                body = {
                    "model": model,
                    "messages": [
                        {"role": "system", "content": system},
                        {"role": "user", "content": "word " * rng.randrange(5, 120)},
                    ],
                    "max_tokens": rng.choice([10, 30, 60]),
                    "ignore_eos": True,
                    "stream": True,
                }
                client.post("/v1/chat/completions", json=body)
                self._ending.wait(rng.random() * 0.4)
