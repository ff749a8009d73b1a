"""Edits of hand-written settings: whatever the text, either exactly what was meant or an error."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.skill import jsonc
from atoll.skill.jsonc import BadSettings

KEYS = st.text(max_size=6)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=10,
)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=4)
FORMS = st.sampled_from([None, 0, 1, 2, 4, "\t"])


@given(OBJECTS, FORMS, VALUES)
def test_put_and_take_out_are_exact(data: dict[str, Any], indent: Any, value: Any) -> None:
    """Add and remove a member at any depth, in any layout."""
    data.pop("ours", None)
    text = json.dumps({**data, "ours": {"old": 1}}, indent=indent)
    made = jsonc.put(text, ["ours", "new"], value)
    assert json.loads(made) == {**data, "ours": {"old": 1, "new": value}}
    assert json.loads(jsonc.take_out(made, ["ours", "new"])) == {**data, "ours": {"old": 1}}
    assert json.loads(jsonc.take_out(made, ["ours"])) == data


@given(
    st.lists(st.text(max_size=5), max_size=5), st.lists(st.text(min_size=1, max_size=5), unique=True, max_size=4), FORMS
)
def test_lists_grow_and_shrink_exactly(there: list[str], items: list[str], indent: Any) -> None:
    text = json.dumps({"a": {"b": there}}, indent=indent)
    made = jsonc.extend(text, ["a", "b"], items)
    assert json.loads(made)["a"]["b"] == there + [item for item in items if item not in there]
    assert json.loads(jsonc.drop(made, ["a", "b"], items))["a"]["b"] == [item for item in there if item not in items]


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Agree with the standard reader wherever that reads an object; never fail otherwise."""
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError):
        plain = None
    try:
        found = jsonc.parse(text).value
    except BadSettings:
        assert not isinstance(plain, dict | list)
        return
    if isinstance(plain, dict | list):
        assert found == plain


def test_comments_stay_where_they_are() -> None:
    text = '{ // head\n  "a": 1 // one\n  /* tail */\n}\n'
    made = jsonc.put(text, ["b", "c"], True)
    assert jsonc.parse(made).value == {"a": 1, "b": {"c": True}}
    for comment in ("// head", "// one", "/* tail */"):
        assert comment in made


@pytest.mark.parametrize("text", ["[" * 500, '{"a":1,,}', "{'a':1}", '{"a":1}{', "nul", '"\\x"', '{"a":01}'])
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(BadSettings):
        jsonc.parse(text)
