"""Names that are gone: one line of error says what to use instead."""

import re

import pytest

from cache import make_policy, retired
from experiments import cli
from experiments.registry import EXPERIMENTS
from models import LLMOptions

COMMANDS = """run kernel_time; run kernel-resources --quick; plot predictions; try hazard
run overhead --part replay launch; run kernel_latency --vllm=file.py"""


@pytest.mark.parametrize("command", re.split("; |\n", COMMANDS))
def test_the_command_line_refuses_them(command, capsys):
    assert cli.main(command.split()) == 2
    out, err = capsys.readouterr()
    assert re.fullmatch(r"error: .+ is gone; instead: .+\n", err)
    assert not out


def test_errors_of_options_and_policies_name_them():
    with pytest.raises(TypeError, match="event_log= is gone; instead: enable_kv_cache_events"):
        LLMOptions(event_log="x")
    with pytest.raises(ValueError, match=r"^policy priority is gone; instead: retention$"):
        make_policy("priority")


@pytest.mark.parametrize("module", ["kernels.select_blocks", "cache.policies.Request"])
def test_imports_name_them(module):
    package, _, name = module.rpartition(".")
    for statement in (f"import {module}", f"from {package} import {name}"):
        with pytest.raises(ImportError, match=f"^{module} is gone; instead: "):
            exec(statement)
    with pytest.raises(AttributeError, match=r"^kernels\.update_block_bounds is gone; instead"):
        exec("import kernels; kernels.update_block_bounds")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'kernels\.nothing'$"):
        exec("import kernels.nothing")


def test_no_name_is_there_and_no_replacement_is_gone():
    table = retired._table()
    assert len(table) > 30
    assert not table.keys() & {f"experiment {name}" for name in EXPERIMENTS}
    assert not table.keys() & set(re.findall("`(.+?)`", " ".join(table.values())))
