import re
from pathlib import Path

import credit

TEXT = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()


def test_every_python_block_of_the_methods_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) >= 6
    names: dict = {}
    for block in blocks:
        exec(compile(block, "docs/methods.md", "exec"), names)


def test_the_methods_page_names_every_method_advantage_and_signal():
    for name in (*credit.METHODS, *credit.ADVANTAGES, *credit.SIGNALS):
        assert f"`{name}`" in TEXT, name
