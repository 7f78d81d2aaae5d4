"""Chat templates are rendered as transformers renders them, in a sandbox."""

import pytest

from refusion_jax import UserError
from refusion_jax.data.chat_template import ChatTemplate

TURNS = [{"role": "user", "content": "a\u2028 \U0001f600"}, {"role": "assistant", "content": "b"}]


def test_a_template_renders_turn_after_turn():
    template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m['content'] }}{{ x }}\n{% endfor %}", "here")
    for x in (1, True, None):
        assert template.render(messages=TURNS, x=x) == f"user: a\u2028 \U0001f600{x}\nassistant: b{x}\n"


def test_a_template_may_use_what_transformers_offers_but_the_date():
    source = "{% for x in [m, 2] %}{{ x | tojson }}{% break %}{% endfor %}{{ strftime_now is defined }}"
    assert ChatTemplate(source, "here").render(m={"a<b>&'\u00e9": 1}) == '{"a<b>&\'\u00e9": 1}False'
    marked = "{% generation %}{{ m }}{% set x = 1 %}{% endgeneration %}, {{ strftime_now('%d %B %Y') }}"
    assert ChatTemplate(marked, "here").render(m="b") == "b, 01 July 2025"  # SmolLM3's insists on a date
    with pytest.raises(UserError, match="^the chat template fails: no system turns"):
        ChatTemplate("{{ raise_exception('no system turns') }}", "here").render()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for", "here: the chat template cannot be read: "),
        ("{% break %}", "here: the chat template cannot be read: 'break' outside loop"),
        ("{{ messages.__class__.__mro__ }}", "^the chat template fails: access to attribute"),
        ("{{ nobody.knows }}", "^the chat template fails: 'nobody' is undefined"),
        ("{{ messages + 1 }}", "^the chat template fails: "),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_one_line(source, said):
    with pytest.raises(UserError, match=said) as error:
        ChatTemplate(source, "here").render(messages=TURNS)
    assert "\n" not in str(error.value)
