"""The page of `report`: what runs have recorded, nothing else, and no markup of theirs."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from conftest import run
from helpers import write_lines

from refusion_jax.training import run_report
from refusion_jax.training.events import account, describe, read_events
from refusion_jax.training.metrics import read_metrics

pytest.importorskip("matplotlib", reason="pip install -e '.[plots]'")
HOSTILE = "</pre><script>alert(1)</script><img src=https://example.com/x>"


class Page(HTMLParser):
    """What a page holds: its tags, what they would load, and its text by the tag that it stands in."""

    def __init__(self, text: str):
        super().__init__()
        self.loads, self.texts, self._open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.loads += [x for name, x in attrs if name in ("src", "href", "xlink:href", "srcset", "data")]
        self.texts.append([tag, ""])
        if tag not in ("meta", "link"):  # which have no end
            self._open.append(self.texts[-1])

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        if self._open:
            self._open[-1][1] += data

    @property
    def tags(self) -> set[str]:
        """Its kinds of tags."""
        return {tag for tag, _ in self.texts}

    def of(self, tag: str) -> list[str]:
        """The texts in one kind of tag."""
        return [text for where, text in self.texts if where == tag]


@pytest.fixture(scope="module")
def others(tmp_path_factory, trained_run):
    """A run like the trained one, evaluated and still going on; and one whose files a stranger has made."""
    live, hostile = (tmp_path_factory.mktemp("runs") / name for name in ("live", "hostile"))
    records = read_metrics(trained_run)[:40]
    for record in records[9::10]:
        record |= {"eval_loss": 2.0, "eval_loss_ar": 1.5, "eval_bits_per_byte": 3.0, "eval_sums_exact_match": 0.5}
        record |= {f"eval_loss_mdm_slot_size_{size}": 1.0 / size for size in (16, 4, 8)}
    sample = {"task": "sums", "problem": 0, "asked": "1 + 1?", "answered": "3", "right": "2"}
    scene = {"system": "it", "prompt": HOSTILE, "groups": [[["3", 0, 0]]], "counts": [0, 1], "words": [HOSTILE]}
    scene |= {"drafts": [[[0, 0, 1]]], "plans": [[]]}
    samples = [{"step": step} | sample | {"answered": f"at {step}", "scene": scene} for step in (10, 20)]
    hostile_sample = dict.fromkeys(sample, HOSTILE)
    broken = [hostile_sample | {"step": 1, "problem": 0, "scene": scene | {"counts": ["x"]}}]
    wrong = [None, -1e999, float("nan"), 10**400, "1", [], {"x": 1}, True, 1e29, -0.5]
    strange = [{"step": i, "tokens": 10 * i, "loss": x, f"eval_{HOSTILE}": i} for i, x in enumerate(wrong)]
    strange += [{"step": 90, "tokens": wrong[3], "loss": 1.0}, {"step": 91, "tokens": 900, "eval_\ud800$x$": 2.0}]
    for workdir, metrics, answers in ((live, records, samples), (hostile, strange, [*broken, {"step": "x"} | sample])):
        workdir.mkdir()
        shutil.copy(trained_run / "events.jsonl", workdir)
        config = json.loads((trained_run / "config.json").read_text()) | {"steps": 80, "learning_rate": 0.5}
        (workdir / "config.json").write_text(json.dumps(config))
        with write_lines(workdir / "metrics.jsonl", metrics).open("a") as file:
            file.write('{"step": 41, "loss": 1')
        write_lines(workdir / "samples.jsonl", answers)
    with (hostile / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 10**400, "event": "end", "seconds": 10**400, "reason": HOSTILE}) + "\n")
        file.write(json.dumps({"time": 0, "event": "end", "seconds": 1, "reason": HOSTILE}) + "\n")
    return live, hostile


def test_a_page_shows_what_runs_have_recorded(trained_run, others, tmp_path):
    live, _ = others
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "index.html").write_bytes(run_report.BEGINNING + b" an older one")
    out, err = run("report", f"--workdir={trained_run},{live}", f"--output={tmp_path}/new")
    page = Page((tmp_path / "new" / "index.html").read_text())
    assert not page.tags & {"script", "iframe", "img", "object", "form"}
    assert all(link.startswith(("#", "data:,", "answers.html")) for link in page.loads)
    assert page.loads.count("answers.html#prompt-0") == 1
    played = (tmp_path / "new" / "answers.html").read_text()
    assert HOSTILE not in played
    assert re.findall('"system":"(.*?)"', played) == [f"2 {live}, step 20: it"]
    names = [f"1 {trained_run}", f"2 {live}"]
    cells = page.of("td")
    assert (cells[1], cells[10]) == ("60 of 60", "40 of 80")
    assert (cells[8], cells[17]) == ("complete", "complete")
    charts = ["loss", "loss_ar", "loss_mdm", "eval_bits_per_byte", "eval_loss", "eval_loss_ar"]
    charts += [f"eval_loss_mdm_slot_size, {names[1]}", "eval_sums_exact_match", "grad_norm", "learning_rate"]
    charts += ["tokens_per_second"]  # a CPU has no MFU
    assert page.of("h3") == [*charts, *names, "sums, problem 0 "]
    assert page.of("pre") == ["1 + 1?", "2", "at 20"]
    assert describe(account(read_events(live))).partition(":")[0] in page.of("p")
    config = cells[18:]
    assert [tuple(config[i : i + 2]) for i in range(0, len(config), 2)] == [("60", "80"), ("0.002", "0.5")]
    pictures = sorted((tmp_path / "new").glob("*.png"))
    assert [path.name[4:-4] for path in pictures][:6] == charts[:6]
    assert len(pictures) == len(charts)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    assert (out, err) == (f"{tmp_path}/new/index.html shows 2 runs in {len(charts)} charts\n", "")

    page = Page(run_report.page([run_report.read_run(1, str(live))], []))
    assert ["0.5", "0.0003"] in [page.of("td")[i : i + 2] for i in range(9, len(page.of("td")), 2)]  # the default


def test_a_line_has_the_points_that_were_logged(trained_run, others):
    runs = [run_report.read_run(number, str(path)) for number, path in enumerate((trained_run, others[0]), 1)]
    found = {chart.title: chart for _, _, charts in run_report.sections(runs) for chart in charts}
    for line, own in zip(found["loss"].lines, runs, strict=True):
        assert line.points == [(r["tokens"], r["loss"]) for r in own.records]
    (group,) = (chart for title, chart in found.items() if "slot_size" in title)
    assert [(line.label, line.points[0][1]) for line in group.lines] == [("4", 0.25), ("8", 0.125), ("16", 0.0625)]


def test_files_of_a_stranger_become_text_alone(others, tmp_path):
    out, err = run("report", f"--workdir={others[1]}", f"--output={tmp_path}")
    text = (tmp_path / "index.html").read_text()
    page = Page(text)
    assert "<script" not in text
    assert not page.tags & {"script", "img"}
    assert page.of("pre") == [HOSTILE] * 3
    assert f"eval_{HOSTILE}" in page.of("h3")
    assert (out.count("\n"), err) == (1, "")
    assert all(re.fullmatch(r"[\w.-]+\.png|index\.html", path.name) for path in tmp_path.iterdir())
