"""Every page of ours in Chromium: nothing fails, nothing loads, everybody can read them.

Needs Chromium with its driver, `pip install -e '.[browser]'`, and axe.min.js of axe-core (`npm pack axe-core`), which
REFUSION_AXE names. Screenshots go to the directory REFUSION_SCREENSHOTS, if that is set.
"""

import itertools
import json
import os
import re
import shutil
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY_RUN, run, serving
from helpers import write_lines

from refusion_jax.config.run_config import read_config
from refusion_jax.training.inspection import training_batch

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of selenium, which leaves files open
SIZES = [(400, 800), (1280, 900), (1600, 900)]
CHAT = ["--decode.slot_size=4", "--decode.serial_blocks=2", "--decode.max_new_tokens=32"]
OUTSIDE = "return performance.getEntriesByType('resource').map(e => e.name).filter(n => !n.startsWith(location.origin))"
ONE_TOKEN = """
const one = view($('text')), range = new Range();
one.take({choices: [{text: 'א!', forwards: 1}], usage: {completion_tokens: 1}});
one.end();
const written = one.box.querySelectorAll('.text span')[1].firstChild;
const lefts = [0, 1].map((at) => {
  range.setStart(written, at);
  range.setEnd(written, at + 1);
  return range.getBoundingClientRect().left;
});
return [one.box.querySelector('.figures').textContent, lefts];
"""
FAULTS = "const done = arguments[0]; axe.run().then(found => done(found.violations))"


@pytest.fixture(scope="module")
def browser():
    """Chromium without a screen, and without any way out of this machine."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install -e '.[browser]'")
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs Chromium and its driver: apt install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    for argument in ("headless=new", "no-sandbox", "disable-gpu"):
        options.add_argument(f"--{argument}")
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def look(browser, name: str) -> None:
    """Checks the page as it stands, in all themes and sizes."""
    for theme, (width, height) in itertools.product(("light", "dark"), SIZES):
        scheme = {"name": "prefers-color-scheme", "value": theme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
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
    run(
        "generate",
        f"--checkpoint={trained_run}",
        f"--input={prompts}",
        f"--watch={page}",
        "--compare=sequential",
        *CHAT,
    )
    browser.get(page.as_uri())
    browser.find_element("tag name", "summary").send_keys(" ")  # its key, and not that which plays
    assert browser.find_element("id", "legend").get_attribute("open")
    last = int(browser.find_element("id", "at").get_attribute("max"))
    assert last > 1
    for forward in range(last + 1):
        if forward in (0, last // 2, last):
            look(browser, f"player_{forward}")
        browser.find_element("id", "next").click()
    for article in browser.find_elements("css selector", "section article"):
        forwards = re.match(r"Forward (\d+) of (\d+): ", article.find_element("tag name", "p").text)
        tokens = re.match(r"(\d+) of (\d+) tokens, ", article.find_element("class name", "meter").text)
        assert (forwards[1], tokens[1]) == (forwards[2], tokens[2])


def test_the_page_of_the_server_answers(browser, trained_run):
    from selenium.webdriver.support.ui import WebDriverWait

    with serving(f"--checkpoint={trained_run}", *CHAT) as address:
        browser.get(f"{address}/")
        WebDriverWait(browser, 20).until(lambda b: b.find_element("css selector", "#ask textarea").is_enabled())
        look(browser, "chat_empty")
        browser.find_element("id", "input").send_keys("Sort 7 3 9 1.", "\n")
        ended = "return document.querySelector('article:not(.user)') && document.getElementById('stop').disabled"
        WebDriverWait(browser, 60).until(lambda b: b.execute_script(ended))
        assert browser.find_element("css selector", "article:not(.user) .figures").text
        browser.execute_script("model.id = 'of a server before'; $('name').textContent = model.id")
        browser.find_element("id", "input").send_keys("Sort 7 3 9 1.", "\n")
        WebDriverWait(browser, 60).until(lambda b: b.find_element("id", "name").text == f"{trained_run}")
        look(browser, "chat_answered")
        phone = {"width": 360, "height": 640, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
        browser.find_element("css selector", "[value=text]").click()
        browser.find_element("id", "input").send_keys("Sort 7 3 9 1.")
        hidden = "return $('text').getBoundingClientRect().bottom - $('ask').getBoundingClientRect().top"
        written = "return document.querySelectorAll('#text button').length"
        for count in range(1, 4):
            browser.find_element("id", "send").click()
            WebDriverWait(browser, 60).until(lambda b, n=count: b.execute_script(written) == n)
            assert browser.execute_script(hidden) <= 0  # the newest answer is in sight
        figures, lefts = browser.execute_script(ONE_TOKEN)
        assert figures.startswith("1 token, 1 forward, ")
        assert lefts[0] > lefts[1]  # what ends a text that is read from the right is on its left
        fetch = "window.fetch = (...asked) => (sent.push(asked), new Promise(() => {})); window.sent = []"
        browser.execute_script(f"{fetch}; model.fills_gaps = false; setMode(); $('input').setSelectionRange(2, 4)")
        browser.find_element("id", "send").click()  # by a decoder without gaps
        asked = json.loads(browser.execute_script("return sent[0][1].body"))
        assert asked["prompt"] == "Sort 7 3 9 1."
        assert "suffix" not in asked
        browser.find_element("css selector", "[value=chat]").click()
        browser.find_element("id", "new").click()  # does not end what is written in the other mode
        assert browser.execute_script("return Boolean(running) && !running.signal.aborted")
        browser.find_element("css selector", "[value=text]").click()
        browser.find_element("id", "new").click()
        assert browser.execute_script("return running.signal.aborted")
        browser.get("about:blank")


def test_all_fields_of_requests_are_told_without_a_network(browser, trained_run):
    from selenium.webdriver.support.ui import WebDriverWait

    with serving(f"--checkpoint={trained_run}", *CHAT) as address:
        browser.get(f"{address}/docs")
        WebDriverWait(browser, 20).until(lambda b: b.find_elements("tag name", "dt"))
        with urllib.request.urlopen(f"{address}/openapi.json") as answer:
            told = json.load(answer)
        text = browser.find_element("tag name", "main").text
        assert all(path in text for path in told["paths"])
        for schema in told["components"]["schemas"].values():
            for name, field in schema.get("properties", {}).items():
                assert f"{name}: " in text
                assert field.get("description", "") in text
        look(browser, "docs")
        browser.get("about:blank")


def test_the_report_of_runs_is_read_by_everybody(browser, trained_run, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install -e '.[plots]'")
    run("report", f"--workdir={trained_run},{trained_run}", f"--output={tmp_path}")
    browser.get((tmp_path / "index.html").as_uri())
    look(browser, "report")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    styles = "return ['.chip', '.scroll'].map(of => getComputedStyle(document.querySelector(of)))"
    chip, table = browser.execute_script(f"{styles}.map(has => [has.printColorAdjust, has.overflowX])")
    assert (chip[0], table[1]) == ("exact", "visible")  # the colors of runs, and columns that are not in sight
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_the_page_about_prepared_data_is_read_by_everybody(browser, trained_run, tmp_path):
    lines = [{"text": text * 9} for text in ("one ", "two two ", "שלום ", "w" * 30)]
    flags = [f"--input={write_lines(tmp_path / 'in.jsonl', lines)}", f"--tokenizer={trained_run}/tokenizer.model"]
    run("prepare", *flags, "--row_length=64", f"--output={tmp_path}/out")
    run("inspect_data", f"--data={tmp_path}/out", f"--html={tmp_path}/data.html")
    browser.get((tmp_path / "data.html").as_uri())
    look(browser, "data")


@pytest.mark.parametrize("objective", ["refusion", "block_diffusion"])
def test_a_token_of_a_training_row_shows_what_it_attends_to(objective, browser, trained_run, tmp_path):
    page = tmp_path / "row.html"
    flags = [flag for flag in TINY_RUN if "steps" not in flag] + [f"--config.objective={objective}"]
    run("inspect_data", *flags, f"--workdir={trained_run}", f"--html={page}")
    config = read_config(trained_run)
    config.objective = objective
    batch = training_batch(config, trained_run, 0)[-1]
    mask, segments = np.asarray(batch.visibility.mask())[0], np.asarray(batch.visibility.segment_ids)[0]
    browser.get(page.as_uri())
    length, own = len(mask), np.flatnonzero(segments)
    for cell in (0, *own[:: len(own) // 5], int(own[-1]), length - 1):
        move = f"cells[{cell}].dispatchEvent(new PointerEvent('pointerover', {{bubbles: true}}))"
        browser.execute_script(move)
        seen = browser.execute_script("return cells.map(cell => cell.classList.contains('seen'))")
        np.testing.assert_array_equal(seen, mask[cell], err_msg=f"of cell {cell}")
        told = browser.find_element("id", "about").text
        assert told.startswith(f"Cell {cell} of {length}: ")
        assert f"; sees {mask[cell].sum()} (rank" in told
    key = "$('row').dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0]})); return at"
    moves = {"Home": 0, "ArrowRight": 1, "ArrowLeft": 0, "End": length - 1}
    assert {name: browser.execute_script(key, name) for name in moves} == moves
    assert browser.execute_script(key, "ArrowUp") < length - 1
    browser.execute_script("show(arguments[0]); scrollTo(0, 0)", int(own[len(own) // 2]))
    look(browser, f"row_{objective}")
