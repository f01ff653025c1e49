"""What pages show is so: their code runs and prints what they say, and what they name exists."""

import contextlib
import functools
import importlib.util
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import tyro

from experiments import cli
from experiments.gpu import contact
from models import generate

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text("utf-8")
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    if path.stem != "CHANGELOG"
}
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
NAMED = re.compile(r"`((?:cache|docs|experiments|kernels|models|tests)/[\w./-]+)`")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"`((?:pagelab|python -m|pytest) [^`]+)`")
PLACEHOLDER = re.compile(r"\b[A-Z]{4,}\b|\.\.\.|/<|…")
NOT_RUN = {"docs/tiers.md: find            the hit": "explains calls, is no output"}
"""Page and beginning of blocks that are neither run nor compared, and the reason."""
KINDS = {"python": "python", "json": "data", "mermaid": "data"}
PROGRAMS = {"pagelab", "python", "pytest", "make", "pip", "git", "."}
LEAST = Counter({"python": 18, "command": 15, "printed": 15, "data": 3})


def blocks(page):
    """Kind and text of each block.  What is printed directly follows its code or command."""
    kind, end = "", 0
    for block in BLOCK.finditer(PAGES[page]):
        language, text = block.groups()
        follows = not PAGES[page][end : block.start()].strip() and kind in ("python", "command")
        if any(f"{page}: {text}".startswith(start) for start in NOT_RUN):
            kind = "not run"
        elif language in KINDS:
            kind = KINDS[language]
        elif PROGRAMS & {*text.replace("\\\n", "").partition("\n")[0].split()}:
            kind = "command"
        else:
            kind = "printed" if follows else f"not in NOT_RUN: {text}"
        yield kind, text
        end = block.end()


def test_every_block_is_run_or_has_a_reason():
    counts = Counter(kind for page in PAGES for kind, _ in blocks(page))
    assert counts.pop("not run") == len(NOT_RUN)
    assert counts.keys() == LEAST.keys()
    assert counts >= LEAST


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder: what is in the checkout, and the files that a page's blocks name."""
    for path in ROOT.glob("[!.]*"):
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_code_prints_what_the_page_says(page, folder):
    """A block that begins with the name of a file is written to it; a command may run the file."""
    names, absent, shown = {"__name__": page}, "", [*blocks(page), ("", "")]
    for (kind, text), (following, printed) in itertools.pairwise(shown):
        if kind == "python" and (file := re.match(r"# (\w+\.py)\n", text)):
            (folder / file[1]).write_text(text)
            if f"\npython {file[1]}\n" in PAGES[page]:
                continue
        try:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                if kind == "python":
                    exec(compile(text, page, "exec"), names)
                elif following == "printed":
                    run(text)
        except FileNotFoundError as error:
            absent = str(error)
            assert "make model" in absent
        else:
            expected = re.escape(printed).replace(r"\.\.\.", ".*")
            output = out.getvalue()
            assert following != "printed" or re.fullmatch(expected, output), output
    if absent:
        pytest.skip(absent)


def run(text):
    """Print what commands print in a process where kernels are compiled."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("TRITON_INTERPRET", None)
    for program, *arguments in commands(text):
        start = [sys.executable, *{"pagelab": ["-m", "experiments"], "python": []}[program]]
        done = subprocess.run([*start, *arguments], env=env, capture_output=True, text=True)
        if "make model" in done.stderr:
            raise FileNotFoundError(done.stderr)
        assert done.returncode == 0, done.stderr
        print(done.stdout, end="")


def commands(text):
    """The words of each command, without variables and programs that run it."""
    for line in text.replace("\\\n", "").splitlines():
        words = shlex.split(line, comments=True)
        begin = next((i for i, word in enumerate(words) if word in PROGRAMS), 0)
        if words:
            yield words[begin:]


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page, folder, monkeypatch, capsys):
    """Command lines of `pagelab` are read, but the work is not done."""
    for name in ("_reproduce", "_report", "_try", "_check"):
        idle = functools.wraps(getattr(cli, name))(lambda *args, **options: 0)
        monkeypatch.setattr(cli, name, idle)
    monkeypatch.setattr(cli, "_run", lambda *args, **options: SimpleNamespace(went_wrong=False))
    monkeypatch.setattr(cli, "plot_results", lambda *args: [])
    named = [text.replace("\n", " ") for text in COMMAND.findall(PAGES[page])]
    named += [text for kind, text in blocks(page) if kind == "command"]
    for words in (words for text in named for words in commands(text)):
        match words:
            case ["pagelab" | "pytest", *_] if PLACEHOLDER.search(" ".join(words)):
                pass
            case ["pagelab", "generate", *arguments]:
                tyro.cli(generate.Arguments, args=arguments, config=(tyro.conf.UseAppendAction,))
            case ["pagelab", "gpu", *arguments] | [_, _, "experiments", "gpu", *arguments]:
                with pytest.raises(SystemExit):
                    contact.main([*arguments, "--seconds", "0"])
                assert "--seconds 0: needs" in capsys.readouterr().err
            case ["pagelab", *arguments] | [_, _, "experiments", *arguments] if arguments:
                assert cli.main(arguments) == 0, capsys.readouterr().err
            case ["pytest", *arguments] | [_, "-m", "pytest", *arguments]:
                files = [word.partition("::")[0] for word in arguments if "/" in word]
                assert all([*folder.glob(file)] for file in files), files
            case ["python", "-m", module, *_]:
                assert importlib.util.find_spec(module), module
            case ["python", file, *_]:
                assert (folder / file).exists() or file in PAGES[page], file
            case ["make", *targets]:
                rules = (ROOT / "Makefile").read_text()
                assert all("=" in name or f"\n{name}:" in rules for name in targets), targets
            case _:
                assert words[0] in {".", "git", "pip"}, words


@pytest.mark.parametrize("page", PAGES)
def test_paths_and_data_exist(page):
    links = [(ROOT / page).parent / link for link in LINK.findall(PAGES[page]) if "://" not in link]
    paths = links + [ROOT / name for name in NAMED.findall(PAGES[page])]
    assert not [str(path) for path in paths if not path.exists()]
    for text in re.findall(r"^```json\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL):
        json.loads(text)
