"""Attempt keys: only the store's secret makes them, and every change to one is noticed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentlightning.store import keys

SECRET = b"s" * 32
ids = st.from_regex(r"[A-Za-z0-9_.:\-]{1,40}", fullmatch=True)


@given(ids, ids, st.booleans())
def test_a_key_names_its_rollout_and_attempt_and_whether_it_gives_rewards(
    rollout_id, attempt_id, rewards
):
    key = keys.sign(SECRET, rollout_id, attempt_id, rewards=rewards)
    assert key.startswith("agl-")
    assert keys.verify(SECRET, key) == (rollout_id, attempt_id, rewards)
    assert keys.verify(keys.new_secret(), key) is None


@given(st.data())
def test_a_key_with_any_character_changed_is_no_key(data):
    key = keys.sign(SECRET, "ro-1", "at-1")
    place = data.draw(st.integers(0, len(key) - 1))
    other = data.draw(st.characters(exclude_characters=key[place]))
    assert keys.verify(SECRET, key[:place] + other + key[place + 1 :]) is None


@given(st.text())
def test_arbitrary_text_is_no_key(text):
    assert keys.verify(SECRET, text) is None
    assert keys.verify(SECRET, f"agl-{text}") is None
