"""Reading Dockerfiles: instructions, variables, stages and ignore files, ordinary and hostile."""

import pytest

from atoll.errors import InvalidArgument
from atoll.images.build import stages
from atoll.images.build.dockerfile import MAX_BYTES, MAX_INSTRUCTIONS, parse
from atoll.images.build.ignore import Ignore, Pattern
from atoll.images.build.variables import expand, words

FILE = """# comment
FROM debian:12 AS base

RUN echo a && \\
    # inside
    echo b
COPY --chown=1:2 --from=base <<EOF <<-"RAW" /x/
one $A
EOF
	two $A
	RAW
CMD ["a", "b"]
"""


def test_instructions_have_their_lines_flags_and_heredocs() -> None:
    found = parse(FILE)
    assert [(one.line, one.name) for one in found] == [(2, "FROM"), (4, "RUN"), (7, "COPY"), (12, "CMD")]
    assert found[1].text == "echo a &&     echo b"
    assert found[2].flags == {"chown": "1:2", "from": "base"}
    assert [(doc.word, doc.text, doc.expands) for doc in found[2].heredocs] == [
        ("EOF", "one $A\n", True),
        ("RAW", "two $A\n", False),
    ]
    assert found[3].argv() == ("a", "b")


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("FROM a\nONBUILD RUN x", 2, "ONBUILD is not supported"),
        ("FROM a\nRUN --mount=type=cache x", 2, "--mount"),
        ("FROM a\nCOPY --parents a b", 2, "--parents"),
        ("FROM a\n\nRUN", 3, "no arguments"),
        ("FROM a\nRUN <<EOF\nx", 2, "never ends"),
        ("RUN x\nFROM a", 1, "before the first FROM"),
        ("FROM a\n" + "RUN x\n" * MAX_INSTRUCTIONS, MAX_INSTRUCTIONS + 1, "one too many"),
    ],
)
def test_what_is_not_understood_is_an_error_with_its_line(text: str, line: int, why: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        parse(text)
    assert error.value.details["line"] == line and why in error.value.message


@pytest.mark.parametrize("text", ["", "ARG A", "# only\n", "FROM a\0b", "x" * (MAX_BYTES + 1)])
def test_what_is_no_dockerfile_is_an_error(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$A-${A}", "1-1"), ("${N:-x$A}", "x1"), ("${A:+y}", "y"), ("${N:+y}", ""), ("${E-d}|${E:-d}", "|d"),
        ("'$A' \"$A\"", "$A 1"), (r"\$A a\ b", "$A a b"), ("$", "$"), ("${N:-${A}}", "1"),
    ],
)  # fmt: skip
def test_variables_are_expanded_as_a_shell_would(text: str, value: str) -> None:
    assert expand(text, {"A": "1", "E": ""}) == value


def test_words_are_split_outside_quotes() -> None:
    assert words('a="b c" d\\ e $A', {"A": "x y"}) == ["a=b c", "d e", "x y"]


@pytest.mark.parametrize("text", ["${A", "${A^^}", "${1}", "'a", "${N:?gone}", "${A:-" * 50])
def test_variables_that_cannot_be_expanded_are_errors(text: str) -> None:
    with pytest.raises(InvalidArgument):
        expand(text, {})


def test_an_argument_that_doubles_itself_ends_with_an_error() -> None:
    text = "FROM a\n" + "".join(f"ARG A{n + 1}=$A{n}$A{n}\n" for n in range(64))
    env = {"A0": "0123456789"}
    with pytest.raises(InvalidArgument, match="larger"):
        for one in parse(text)[1:]:
            stages.declare(one, env, env, {})


def test_only_the_stages_that_a_target_needs_are_built() -> None:
    text = "ARG B=one\nFROM x AS one\nFROM y AS two\nFROM $B AS three\nCOPY --from=0 a b\nFROM z"
    found, args = stages.split(parse(text), {})
    assert args == {"B": "one"}
    assert [one.number for one in stages.needed(found, "three")] == [0, 2]
    assert [one.number for one in stages.needed(found, "")] == [3]
    with pytest.raises(InvalidArgument, match="no stage"):
        stages.needed(found, "four")


@pytest.mark.parametrize(
    ("pattern", "fits", "not_fits"),
    [
        ("*.log", ["a.log"], ["b/a.log", "a.logs"]),
        ("**/*.log", ["a.log", "b/c/a.log"], ["a.txt"]),
        ("a/**", ["a/b", "a/b/c"], ["b"]),
        ("a?[b-d].x", ["azc.x"], ["aze.x", "ac.x"]),
        ("[!a]x", ["bx"], ["ax"]),
        ("./a//b/../c", ["a/c"], ["a/b/c"]),
    ],
)
def test_patterns(pattern: str, fits: list[str], not_fits: list[str]) -> None:
    found = Pattern(pattern)
    assert all(map(found.matches, fits)) and not any(map(found.matches, not_fits))


def test_a_pattern_cannot_make_matching_exponential() -> None:
    name = "a" * 250
    assert not Pattern("*a" * 120 + "b").matches(name)
    assert not Pattern("**/a/" * 40 + "b").matches("/".join(["a"] * 90))


def test_the_last_pattern_of_an_ignore_file_decides() -> None:
    ignore = Ignore("# c\nbuild\n*.md\n!README.md\n")
    assert ignore.leaves_out("build/x/y") and ignore.leaves_out("a.md")
    assert not ignore.leaves_out("README.md") and not ignore.leaves_out("src/a.md")
