"""The pages of decodings, the server and runs in Chromium: nothing fails, nothing loads, everybody can read them.

Needs Chromium with its driver, `pip install -e '.[browser]'`, and axe.min.js of axe-core (`npm pack axe-core`), which
REFUSION_AXE names. Screenshots go to the directory REFUSION_SCREENSHOTS, if that is set.
"""

import os
import re
import shutil
from pathlib import Path

import pytest
from conftest import run, serving

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of selenium, which leaves files open
SIZES = [(400, 800), (1280, 900), (1600, 900)]
THEMES = ["light", "dark"]
CHAT = ["--decode.slot_size=4", "--decode.serial_blocks=2", "--decode.max_new_tokens=32"]
OUTSIDE = "return performance.getEntriesByType('resource').map(e => e.name).filter(n => !n.startsWith(location.origin))"
FAULTS = "const done = arguments[0]; axe.run().then(found => done(found.violations))"


@pytest.fixture(scope="module")
def browser():
    """Chromium without a screen, and without any way out of this machine."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install -e '.[browser]'")
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs Chromium and its driver: apt install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def look(browser, name: str, theme: str, size: tuple[int, int]) -> None:
    """Checks the page as it stands, in one theme and size."""
    width = size[0]
    scheme = {"name": "prefers-color-scheme", "value": theme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    metrics = {"width": width, "height": size[1], "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    if folder := os.environ.get("REFUSION_SCREENSHOTS"):
        browser.save_screenshot(str(Path(folder) / f"{name}_{width}_{theme}.png"))
    wide = browser.execute_script("return document.scrollingElement.scrollWidth")
    assert wide <= width, f"{name} is {wide} pixels wide in a window of {width}"
    assert browser.execute_script(OUTSIDE) == []
    if not (axe := os.environ.get("REFUSION_AXE")):
        pytest.skip("REFUSION_AXE names no axe.min.js")
    browser.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})
    browser.execute_script(Path(axe).read_text())
    faults = browser.execute_async_script(FAULTS)
    bad = [(f["id"], f["nodes"][0]["html"]) for f in faults if f["impact"] in ("serious", "critical")]
    assert not bad, f"{name}, {theme}, {width}: {bad}"
    errors = [line["message"] for line in browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]
    assert errors == []


def test_the_player_plays_to_its_end(browser, trained_run, tmp_path):
    page = tmp_path / "page.html"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Sort 7 3 9 1."}\n{"template": ["Add 5 and ", 6, "; ", 4]}\n')
    run("generate", f"--checkpoint={trained_run}", f"--input={prompts}", f"--watch={page}", *CHAT)
    browser.get(page.as_uri())
    last = int(browser.find_element("id", "at").get_attribute("max"))
    assert last > 1
    for forward in range(last + 1):
        if forward in (0, last // 2, last):
            for theme in THEMES:
                for size in SIZES:
                    look(browser, f"player_{forward}", theme, size)
        browser.find_element("id", "next").click()
    for section in browser.find_elements("css selector", "section"):
        told = re.match(
            r"Forward (\d+) of (\d+): .*, (\d+) of (\d+) so far", section.find_element("tag name", "p").text
        )
        assert (told[1], told[3]) == (told[2], told[4])


def test_the_page_of_the_server_answers(browser, trained_run):
    from selenium.webdriver.support.ui import WebDriverWait

    with serving(f"--checkpoint={trained_run}", *CHAT) as address:
        browser.get(f"{address}/")
        WebDriverWait(browser, 20).until(lambda b: b.find_element("css selector", "#ask textarea").is_enabled())
        for theme in THEMES:
            for size in SIZES:
                look(browser, "chat_empty", theme, size)
        browser.execute_script(
            "$('input').value = 'Sort 7 3 9 1.'; $('ask').requestSubmit()"
        )  # emulated, it has no keys
        ended = "return document.querySelector('article:not(.user)') && document.getElementById('stop').disabled"
        WebDriverWait(browser, 60).until(lambda b: b.execute_script(ended))
        assert browser.find_element("css selector", "article:not(.user) .figures").text
        for theme in THEMES:
            for size in SIZES:
                look(browser, "chat_answered", theme, size)
        browser.get("about:blank")


def test_the_report_of_runs_is_read_by_everybody(browser, trained_run, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install -e '.[plots]'")
    run("report", f"--workdir={trained_run},{trained_run}", f"--output={tmp_path}")
    browser.get((tmp_path / "index.html").as_uri())
    for theme in THEMES:
        for size in SIZES:
            look(browser, "report", theme, size)
