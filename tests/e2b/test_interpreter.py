"""The code interpreter by the stock Python SDK, `e2b-code-interpreter`: each method and each kind of result."""

import base64
from typing import Any

import pytest
from e2b import NotFoundException, SandboxException, TimeoutException
from e2b_code_interpreter import Sandbox
from lab.e2b import Door
from lab.waiting import PATIENCE

LONG = 4 * PATIENCE


def run(box: Any, code: str, **options: Any) -> Any:
    done = box.run_code(code, timeout=LONG, **options)
    return done


def text(box: Any, code: str, **options: Any) -> Any:
    done = run(box, code, **options)
    assert done.error is None, done.error.traceback
    return done.text


def test_values_variables_and_counts(code_box: Any) -> None:
    first = run(code_box, "x = 41\nx + 1")
    assert first.text == "42" and first.results[0].is_main_result and first.error is None
    again = run(code_box, "x + 2")
    assert again.text == "43" and again.execution_count == first.execution_count + 1
    assert text(code_box, "'quoted'") == "quoted"
    assert run(code_box, "None").results == []
    assert text(code_box, "await __import__('asyncio').sleep(0, 'awaited')") == "awaited"


def test_who_and_where(code_box: Any) -> None:
    code = "import os, getpass; [getpass.getuser(), os.getcwd(), os.environ['FOO'], os.environ['E2B_SANDBOX_ID']]"
    assert text(code_box, code) == str(["user", "/home/user", "bar", code_box.sandbox_id])


def test_output_as_it_comes(code_box: Any) -> None:
    heard: list[str] = []
    code = "import sys\nprint('out')\nprint('err', file=sys.stderr)\n3"
    done = run(
        code_box, code, on_stdout=lambda one: heard.append(f"1 {one.line}"),
        on_stderr=lambda one: heard.append(f"2 {one.line}"), on_result=lambda one: heard.append(f"= {one.text}"),
    )  # fmt: skip
    assert sorted(heard) == ["1 out\n", "2 err\n", "= 3"]
    assert done.logs.stdout == ["out\n"] and done.logs.stderr == ["err\n"]


def test_errors_have_name_value_and_traceback(code_box: Any) -> None:
    told: list[Any] = []
    done = run(code_box, "def f():\n    return 1/0\nf()", on_error=told.append)
    assert (done.error.name, done.error.value) == ("ZeroDivisionError", "division by zero") and told == [done.error]
    assert "in f()" in done.error.traceback and "\x1b" not in done.error.traceback
    assert run(code_box, "a b").error.name == "SyntaxError"
    assert text(code_box, "7") == "7", "the next cell runs"


@pytest.mark.parametrize(
    ("code", "field", "expected"),
    [
        ("from IPython.display import HTML; HTML('<b>x</b>')", "html", "<b>x</b>"),
        ("from IPython.display import Markdown; Markdown('# x')", "markdown", "# x"),
        ("from IPython.display import SVG; SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>')", "svg", "<svg"),
        ("from IPython.display import Latex; Latex('$x$')", "latex", "$x$"),
        ("from IPython.display import JSON; JSON({'a': [1]})", "json", {"a": [1]}),
        ("from IPython.display import Javascript; Javascript('1')", "javascript", "1"),
    ],
)
def test_kinds_of_results(code_box: Any, code: str, field: str, expected: Any) -> None:
    done = run(code_box, code)
    assert done.error is None, done.error
    found = done.results[0][field]
    assert found.startswith(expected) if field == "svg" else found == expected
    assert field in done.results[0].formats()


def test_unlisted_types_are_extra(code_box: Any) -> None:
    code = "display({'text/plain': 'x', 'application/x-thing': 'y'}, raw=True); display('shown')"
    done = run(code_box, code)
    assert [one.text for one in done.results] == ["x", "shown"]
    assert done.results[0].extra == {"application/x-thing": "y"} and not done.results[0].is_main_result


def test_data_frames_and_charts(code_box: Any) -> None:
    frame = run(
        code_box,
        "import pandas as pd; pd.DataFrame({'a': [1, 2], 'b': [0.5, None], 't': pd.to_datetime(['2026-01-02', None])})",
    )
    assert frame.error is None, frame.error.traceback
    assert frame.results[0].data == {"a": [1, 2], "b": [0.5, None], "t": ["2026-01-02T00:00:00", None]}
    assert "<table" in frame.results[0].html
    lines = run(
        code_box,
        "import matplotlib.pyplot as plt\nplt.plot([1, 2], [3, 4], label='l'); plt.title('T'); plt.xlabel('s (m)'); plt.show()",
    )
    assert lines.error is None, lines.error.traceback
    assert base64.b64decode(lines.results[0].png).startswith(b"\x89PNG")
    chart = lines.results[0].chart
    assert (chart.type.value, chart.title, chart.x_unit) == ("line", "T", "m")
    assert chart.elements[0].label == "l" and chart.elements[0].points == [(1, 3), (2, 4)]
    code = """
def kinds():
    for draw in (lambda a: a.scatter([1], [2]), lambda a: a.bar(['x'], [3]), lambda a: a.pie([1, 2], labels=['p', 'q']),
                 lambda a: a.boxplot([1, 2, 3, 9])):
        fig, ax = plt.subplots(figsize=(1, 1)); draw(ax); plt.show()
    fig, (left, right) = plt.subplots(1, 2, figsize=(1, 1)); left.plot([1], [1]); right.bar(['x'], [1]); plt.show()
kinds()
"""
    done = run(code_box, code)
    assert done.error is None, done.error.traceback
    found = [one.chart.type.value for one in done.results]
    assert found[:3] == ["scatter", "bar", "pie"] and found[4] == "superchart"
    assert [one.type.value for one in done.results[4].chart.elements] == ["line", "bar"]


def test_variables_of_one_execution(code_box: Any) -> None:
    code = "import os; (os.environ.get('FOO'), os.environ.get('ONE'))"
    assert text(code_box, code, envs={"FOO": "other", "ONE": 'it\'s "x"\n'}) == str(("other", 'it\'s "x"\n'))
    assert text(code_box, code) == str(("bar", None))


def test_contexts(code_box: Any) -> None:
    made = code_box.create_code_context(cwd="/tmp", request_timeout=LONG)
    assert (made.language, made.cwd) == ("python", "/tmp")
    assert text(code_box, "y = 1; import os; os.getcwd()", context=made) == "/tmp"
    assert run(code_box, "y").error.name == "NameError", "it has variables of its own"
    assert text(code_box, "y", context=made) == "1"
    assert made.id in [one.id for one in code_box.list_code_contexts()]
    code_box.restart_code_context(made)
    assert run(code_box, "y", context=made).error.name == "NameError"
    assert text(code_box, "os.environ['FOO'] if 'os' in dir() else 'new'", context=made) == "new"
    code_box.remove_code_context(made.id)
    with pytest.raises(NotFoundException):
        run(code_box, "1", context=made)
    with pytest.raises(NotFoundException):
        code_box.remove_code_context(made)


def test_other_languages(code_box: Any) -> None:
    assert text(code_box, "let a = 20; a += 1; a * 2", language="js") == "42"
    again = run(
        code_box,
        "let a = 1; console.log('p'); console.error('e'); ({ b: [a], env: process.env.FOO })",
        language="javascript",
    )
    assert again.logs.stdout == ["p\n"] and again.logs.stderr == ["e\n"]
    assert again.results[0].json == {"b": [1], "env": "bar"}
    assert run(code_box, "throw new TypeError('bad')", language="js").error.name == "TypeError"
    code = "import path, { basename as b } from 'path'\nconst n: number = await Promise.resolve(4); [n, b('/x/y'), typeof path.join].join()"
    assert text(code_box, code, language="ts") == "4,y,function"
    assert text(code_box, "b('/c') + process.env.ONE", language="ts", envs={"ONE": "1"}) == "c1"
    assert run(code_box, "const x: = 1", language="typescript").error.name == "SyntaxError"
    shell = run(code_box, "cd /tmp; v=5; echo $FOO $ONE; pwd", language="bash", envs={"ONE": "a b'c"})
    assert "".join(shell.logs.stdout) == "bar a b'c\n/tmp\n"
    assert "".join(run(code_box, "echo $v-$ONE", language="bash").logs.stdout) == "5-\n"
    assert run(code_box, "false", language="bash").error is not None
    made = code_box.create_code_context(language="js", request_timeout=LONG)
    assert text(code_box, "typeof a", context=made) == "undefined" and made.language == "javascript"
    code_box.remove_code_context(made)


def test_unknown_languages_are_refused_by_name(code_box: Any) -> None:
    for wrong in ("r", "java", "cobol"):
        with pytest.raises(SandboxException, match="python, javascript, typescript, bash"):
            run(code_box, "1", language=wrong)
    with pytest.raises(SandboxException, match="choose one of"):
        code_box.create_code_context(language="r")


def test_a_caller_that_stops_waiting_interrupts_the_cell(code_box: Any) -> None:
    for language, code in (
        ("python", "import time\nwhile True: time.sleep(0.05)"),
        ("js", "while (true) {}"),
        ("bash", "sleep 1000"),
    ):
        text(code_box, "1", language=language) if language != "bash" else run(code_box, "true", language="bash")
        with pytest.raises(TimeoutException):
            code_box.run_code(code, language=language, timeout=1)
        after = run(code_box, "echo on" if language == "bash" else "'on'", language=language)
        assert after.text == "on" or after.logs.stdout == ["on\n"], after


def test_the_rest_of_the_sandbox_is_there_too(code_box: Any) -> None:
    code_box.files.write("from-outside", "hello")
    assert text(code_box, "open('from-outside').read()") == "hello"
    done = code_box.commands.run("python3 -c 'import numpy; print(numpy.arange(3).sum())'", timeout=LONG)
    assert done.stdout == "3\n", "the packages are for every Python inside"
    assert code_box.get_info().template_id == "code-interpreter-v1"


def test_a_fresh_sandbox_has_what_its_creator_gave(code_door: Door, code_box: Any) -> None:
    """Variables count from the first cell, and nothing comes from another sandbox."""
    box = Sandbox.create(timeout=600, envs={"SECOND": "2"}, **code_door.options)
    try:
        code = "import os; (os.environ.get('SECOND'), os.environ.get('FOO'), 'x' in dir())"
        assert text(box, code) == str(("2", None, False))
    finally:
        box.kill()
