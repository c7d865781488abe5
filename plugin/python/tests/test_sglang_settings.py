"""Settings of the adapter of SGLang, which is not needed to read them."""

import pytest

from rootstock.sglang.settings import Settings


def test_settings_have_defaults_and_are_read_from_the_environment(monkeypatch):
    monkeypatch.delenv("ROOTSTOCK", raising=False)
    assert Settings.read() == Settings()
    monkeypatch.setenv("ROOTSTOCK", '{"pin_budget": 0.5, "queue": false, "aging_s": 5}')
    assert Settings.read() == Settings(pin_budget=0.5, queue=False, aging_s=5)
    monkeypatch.setenv("ROOTSTOCK", '{"policy": "agent"}')
    assert Settings.read().policy == "agent"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "no JSON"),
        ("[1]", "not an object"),
        ('{"pins": 1}', "ROOTSTOCK.pins is unknown"),
        ('{"pin_budget": "a lot"}', "not a float"),
        ('{"queue": 1}', "not a bool"),
        ('{"policy": 1}', "not a str"),
        ('{"policy": "slru"}', "not one of lru"),
        ('{"aging_s": true}', "not a float"),
    ],
)
def test_a_mistake_stops_the_start_and_says_what_it_is(monkeypatch, text, why):
    monkeypatch.setenv("ROOTSTOCK", text)
    with pytest.raises(ValueError, match=why):
        Settings.read()
