"""The skill texts are true: every command in them runs, and they say what the contracts want them to say."""

import os
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
import yaml
from lab.sandboxes import PATIENCE, Lab

TEXTS = {
    name: resources.files("atoll.skill").joinpath(f"{name}.md").read_text(encoding="utf-8")
    for name in ("k8e-sandbox", "agentkernel")
}
BLOCKS = [
    (name, place, block)
    for name, text in TEXTS.items()
    for place, block in enumerate(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
]
ENGLISH = (
    "run this",
    "execute",
    "test it",
    "install X",
    "install X and use it",
    "check if this works",
    "analyze this data",
)
CHINESE = (
    "帮我跑", "运行", "试试", "执行", "测试", "安装并使用", "分析这个CSV", "处理这个文件", "看看输出", "帮我算", "帮我跑一下", "运行这个",
    "试试这个", "执行一下", "跑一下", "测试这段代码", "帮我分析这个CSV", "帮我跑这段代码", "跑一下看看", "帮我试试", "能不能跑",
    "帮我算一下", "帮我处理这个文件",
)  # fmt: skip


def header(name: str) -> dict[str, object]:
    found: dict[str, object] = yaml.safe_load(TEXTS[name].split("---\n")[1])
    return found


def words_of(name: str) -> str:
    text = re.sub(r"\s+", " ", str(header(name)["description"]))
    return text.replace(" ,", ",")


@pytest.mark.parametrize(("name", "place", "block"), BLOCKS, ids=[f"{name}-{place}" for name, place, _ in BLOCKS])
def test_k8e_P39_every_command_of_the_texts_runs(lab: Lab, tmp_path: Path, name: str, place: int, block: str) -> None:
    """Run each block as it stands, with `atoll` on PATH and nothing else prepared."""
    program = tmp_path / "atoll"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m atoll "$@"\n')
    program.chmod(0o755)
    env = {**lab.env, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "ATOLL_RUNTIME": "container"}
    env["K8E_SANDBOX_TENANT"] = f"skill-{name}-{place}"
    if "jq" in block and subprocess.run(["sh", "-c", "command -v jq"], capture_output=True).returncode:
        pytest.skip("jq is not installed")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    if '"hello"' in block or "'hello'" in block:
        assert "hello" in done.stdout
    if "finished" in block:
        assert "finished" in done.stdout


def test_k8e_P36_header() -> None:
    found = header("k8e-sandbox")
    assert found["name"] == "k8e-sandbox-skill" and found["user-invocable"] is True
    for word in (
        "run",
        "executed",
        "tested",
        "tried",
        "installed",
        "analysed",
        "Python",
        "bash",
        "Node",
        "CSV",
        "Excel",
    ):
        assert word in str(found["description"])
    assert "When unsure, prefer the sandbox" in words_of("k8e-sandbox") and "explained" in words_of("k8e-sandbox")


def test_k8e_P37_english_triggers() -> None:
    assert [word for word in ENGLISH if word not in words_of("k8e-sandbox")] == []


def test_k8e_P38_chinese_triggers() -> None:
    assert [word for word in CHINESE if word not in words_of("k8e-sandbox")] == []


def test_k8e_P39_rules() -> None:
    text = TEXTS["k8e-sandbox"]
    for word in (
        "python3, node, pip, npm or curl on the host",
        "sudo",
        "--lang python",
        "--raw",
        "jq",
        "stderr",
        "unchanged",
    ):
        assert word in re.sub(r"\s+", " ", text)


def test_the_texts_are_short() -> None:
    assert all(len(text) < 4500 for text in TEXTS.values())
