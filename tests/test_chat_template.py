"""A template is a program by strangers: what it may take, and that nothing but its text comes of it."""

import datetime
import os
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from refusion_jax import UserError
from refusion_jax.data import templates
from refusion_jax.data.chat_template import ChatTemplate
from refusion_jax.data.templates import TemplateError, Templates

TURNS = [{"role": "user", "content": "a\u2028 \U0001f600"}, {"role": "assistant", "content": "b"}]


def test_a_template_renders_turn_after_turn():
    template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m['content'] }}{{ x }}\n{% endfor %}", "here")
    for x in (1, True, None):
        assert template.render(messages=TURNS, x=x) == f"user: a\u2028 \U0001f600{x}\nassistant: b{x}\n"


def test_a_template_may_use_what_transformers_offers_but_the_date():
    source = "{% for x in [m, 2] %}{{ x | tojson }}{% break %}{% endfor %}{{ strftime_now is defined }}"
    assert ChatTemplate(source, "here").render(m={"a<b>&'\u00e9": 1}) == '{"a<b>&\'\u00e9": 1}False'
    with pytest.raises(UserError, match="here: the chat template fails: no system turns"):
        ChatTemplate("{{ raise_exception('no system turns') }}", "here").render()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for", "here: the chat template cannot be read: "),
        ("{{ 'a' * 10**11 }}", "it needs more than 1024 MiB"),
        ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "cannot be read: it is nested too deeply"),
        ("{{ messages[0].content * 10**11 }}", "fails: it needs more than 1024 MiB"),
        ("{{ 9 ** (9 ** 9) }}", "it takes too much time"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "it takes too much time"),
        ("{% for a in range(99999) %}{{ 'a' * 999 }}{% endfor %}", "fails: it gives more than 4,194,304 characters"),
        ("{{ messages.__class__.__mro__ }}", "fails: access to attribute"),
        ("{{ nobody.knows }}", "fails: 'nobody' is undefined"),
    ],
)
def test_a_template_that_loops_grows_or_reaches_out_is_refused(source, said, monkeypatch):
    monkeypatch.setattr(templates, "SECONDS", 1.0)
    with pytest.raises(UserError, match=said):
        ChatTemplate(source, "here").render(messages=TURNS)


def test_one_failure_does_not_spoil_the_next_conversation(monkeypatch):
    monkeypatch.setattr(templates, "SECONDS", 0.5)
    template = ChatTemplate("{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}{{ n }}", "here")
    for n in (2, 99999, 3, 100001, 4):
        if n < 9:
            assert template.render(n=n) == str(n)
        else:
            with pytest.raises(UserError, match="too much time" if n < 100_000 else "Range too big"):
                template.render(n=n)


IGNORING = """
import signal
signal.signal(signal.SIGPROF, signal.SIG_IGN)
from refusion_jax.data import templates
templates.SECONDS, templates._PATIENCE = 0.5, 60.0
try:
    templates.Templates("chat").render("{{ 9 ** (9 ** 9) }}", {})
except templates.TemplateError as error:
    print(error)
"""


def test_signals_that_a_process_ignores_do_not_lift_the_limits():
    """libtpu, once it is loaded, ignores that of the timer, which ends a template that takes too long."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", IGNORING], cwd=ROOT, capture_output=True, text=True)
    assert "it takes too much time" in done.stdout, done.stderr
    assert time.monotonic() - began < 50, "it was ended by the clock"


def test_a_process_with_many_open_files_renders_as_others_do():
    """More than `select` can wait for: a server with a thousand connections."""
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert templates.Templates("chat").render("{{ 1 + 1 }}", {}) == "2"
    finally:
        for file in files:
            os.close(file)


def test_tasks_have_a_dialect_of_their_own_and_the_same_limits(monkeypatch):
    """lm_eval keeps the last newline, refuses names that nobody knows, and has a filter more."""
    monkeypatch.setattr(templates, "SECONDS", 0.5)
    task = Templates("task")
    doc = {"a": "1 #### 2", "day": datetime.date(2026, 1, 2)}
    text = "{{ a.split('####')[-1].strip() }} {{ a|regex_replace('[0-9]', 'n') }} {{ day }}\n"
    assert task.render(text, doc) == "2 n #### n 2026-01-02\n"
    for source, said in {
        "{{ nobody }}": "'nobody' is undefined",
        "{{ 'a' * 10**11 }}": "more than 1024 MiB",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "too much time",
        "{{ ('a' * 40 + 'b')|regex_replace('(a+)+$', '') }}": "too much time",
        "{{ a.__class__.__mro__ }}": "unsafe",
    }.items():
        with pytest.raises(TemplateError, match=said):
            task.render(source, doc)
    assert task.render("{{ a }}", doc) == "1 #### 2"
