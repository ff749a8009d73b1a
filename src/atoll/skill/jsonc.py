"""Changing JSON settings that people wrote by hand: comments, order, spacing and unknown content stay as they are.

A text is read into nodes that know where they stand; a change cuts and inserts there and nowhere else. Each change is read
again and compared with what was meant, so that a file is never left with something else in it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

_SPACE = re.compile(r"(?:[ \t\r\n]+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_WORD = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
DEPTH = 100


class BadSettings(Exception):
    """The file is not what it should be; it stays untouched."""


@dataclass
class Node:
    """A value from `start` to `end`; the members of an object in order, with their keys' places."""

    value: Any
    start: int
    end: int
    members: list[tuple[str, int, Node]] = field(default_factory=list)
    items: list[Node] = field(default_factory=list)

    def member(self, key: str) -> Node | None:
        found = [node for name, _, node in self.members if name == key]
        return found[-1] if found else None


def parse(text: str) -> Node:
    """The whole text as one value; BadSettings when it is none. An empty text is an empty object."""
    if not text.strip():
        return Node({}, 0, len(text))
    node = _value(text, _skip(text, 1 if text.startswith("\ufeff") else 0), 0)
    if _skip(text, node.end) != len(text):
        raise BadSettings(f"something follows after the end, in line {_line(text, node.end)}")
    return node


def put(text: str, path: list[str], value: Any) -> str:
    """The text with `value` at `path`, objects on the way made where they are missing."""
    if not text.strip():
        return json.dumps(_nested(path, value), indent=2, ensure_ascii=False) + "\n"
    root = parse(text)
    node, depth = _deepest(root, path)
    if depth == len(path):
        indent = _indent_at(text, node.start)
        made = text[: node.start] + _dumped(value, indent) + text[node.end :]
    else:
        made = _add_member(text, node, path[depth], _nested(path[depth + 1 :], value))
    return _checked(made, _with(root.value, path, value))


def take_out(text: str, path: list[str]) -> str:
    """The text without what is at `path`; the same text when there is nothing."""
    root = parse(text)
    parent, depth = _deepest(root, path[:-1])
    if depth < len(path) - 1 or parent.member(path[-1]) is None:
        return text
    places = [(key, start, node) for key, start, node in parent.members if key == path[-1]]
    made = text
    for _, start, node in reversed(places):
        made = _cut(made, start, node.end)
    return _checked(made, _without(root.value, path))


def extend(text: str, path: list[str], items: list[str]) -> str:
    """The text with these items in the list at `path`, each once."""
    root = parse(text)
    node, depth = _deepest(root, path)
    if depth < len(path):
        return put(text, path, items)
    if not isinstance(node.value, list):
        raise BadSettings(f"{'.'.join(path)} is not a list")
    missing = [item for item in items if item not in node.value]
    made = text
    if missing:
        made = _add_items(text, node, missing)
    return _checked(made, _with(root.value, path, [*node.value, *missing]))


def drop(text: str, path: list[str], items: list[str]) -> str:
    """The text without these items in the list at `path`."""
    root = parse(text)
    node, depth = _deepest(root, path)
    if depth < len(path) or not isinstance(node.value, list):
        return text
    made = text
    for item in reversed(node.items):
        if item.value in items:
            made = _cut(made, item.start, item.end)
    return _checked(made, _with(root.value, path, [value for value in node.value if value not in items]))


# Reading


def _value(text: str, at: int, depth: int) -> Node:
    if depth > DEPTH:
        raise BadSettings("nested too deeply")
    first = text[at : at + 1]
    if first == "{":
        return _object(text, at, depth)
    if first == "[":
        return _list(text, at, depth)
    found = (_STRING if first == '"' else _WORD).match(text, at)
    if found is None:
        raise BadSettings(f"not JSON in line {_line(text, at)}")
    try:
        return Node(json.loads(found[0]), at, found.end())
    except ValueError:
        raise BadSettings(f"not JSON in line {_line(text, at)}") from None


def _object(text: str, start: int, depth: int) -> Node:
    node = Node({}, start, start)
    at = _skip(text, start + 1)
    while text[at : at + 1] != "}":
        key_at = at
        found = _STRING.match(text, at)
        if found is None:
            raise BadSettings(f"a name is missing in line {_line(text, at)}")
        key = json.loads(found[0])
        at = _skip(text, found.end())
        if text[at : at + 1] != ":":
            raise BadSettings(f"a colon is missing in line {_line(text, at)}")
        child = _value(text, _skip(text, at + 1), depth + 1)
        node.members.append((key, key_at, child))
        node.value[key] = child.value
        at = _after(text, child.end, "}")
    node.end = at + 1
    return node


def _list(text: str, start: int, depth: int) -> Node:
    node = Node([], start, start)
    at = _skip(text, start + 1)
    while text[at : at + 1] != "]":
        child = _value(text, at, depth + 1)
        node.items.append(child)
        node.value.append(child.value)
        at = _after(text, child.end, "]")
    node.end = at + 1
    return node


def _after(text: str, at: int, closing: str) -> int:
    at = _skip(text, at)
    if text[at : at + 1] == ",":
        return _skip(text, at + 1)
    if text[at : at + 1] != closing:
        raise BadSettings(f"a comma is missing in line {_line(text, at)}")
    return at


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


# Writing


def _deepest(root: Node, path: list[str]) -> tuple[Node, int]:
    """The last node on the path that is there, and how far that is."""
    node = root
    for depth, key in enumerate(path):
        if not isinstance(node.value, dict):
            raise BadSettings(f"{'.'.join(path[:depth]) or 'the file'} is not an object")
        child = node.member(key)
        if child is None:
            return node, depth
        node = child
    return node, len(path)


def _add_member(text: str, node: Node, key: str, value: Any) -> str:
    outer = _indent_at(text, node.start)
    inner = _indent_at(text, node.members[0][1]) if node.members else outer + "  "
    if len(inner) <= len(outer):
        inner = outer + "  "
    piece = f"{json.dumps(key, ensure_ascii=False)}: {_dumped(value, inner)}"
    return _insert(text, node, node.members[-1][2].end if node.members else None, piece, inner, outer)


def _add_items(text: str, node: Node, items: list[str]) -> str:
    outer = _indent_at(text, node.start)
    inner = _indent_at(text, node.items[0].start) if node.items else outer + "  "
    if len(inner) <= len(outer):
        inner = outer + "  "
    piece = f",\n{inner}".join(json.dumps(item, ensure_ascii=False) for item in items)
    return _insert(text, node, node.items[-1].end if node.items else None, piece, inner, outer)


def _insert(text: str, node: Node, last: int | None, piece: str, inner: str, outer: str) -> str:
    """Before the closing bracket, behind comments that stand there; with a comma behind what was last until now."""
    close = node.end - 1
    body = text[:close]
    head = body.rstrip(" \t\r\n")
    tail = f"\n{inner}{piece}\n{outer}" + text[close:]
    if last is None:
        return head + tail
    comma = _skip(text, last)
    if comma < close and text[comma] == ",":
        return head + tail
    return head[:last] + "," + head[last:] + tail


def _cut(text: str, start: int, end: int) -> str:
    """Without this piece, one comma beside it, and the line it stood on if nothing else is there."""
    after = _skip(text, end)
    if text[after : after + 1] == ",":
        end = after + 1
    else:
        before = start
        while before and text[before - 1] in " \t\r\n":
            before -= 1
        if before and text[before - 1] == ",":
            start = before - 1
    line_start = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", end)
    if not text[line_start:start].strip() and line_end >= 0 and not text[end:line_end].strip():
        return text[:line_start] + text[line_end + 1 :]
    return text[:start] + text[end:]


def _indent_at(text: str, at: int) -> str:
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _dumped(value: Any, indent: str) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False).replace("\n", "\n" + indent)


def _nested(path: list[str], value: Any) -> Any:
    for key in reversed(path):
        value = {key: value}
    return value


def _with(data: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    found = dict(data)
    found[path[0]] = _with(found.get(path[0], {}), path[1:], value)
    return found


def _without(data: Any, path: list[str]) -> Any:
    if len(path) == 1:
        return {key: value for key, value in data.items() if key != path[0]}
    return {**data, path[0]: _without(data[path[0]], path[1:])}


def _checked(text: str, meant: Any) -> str:
    if parse(text).value != meant:
        raise BadSettings("its form is one this program cannot change safely; please edit it by hand")
    return text
