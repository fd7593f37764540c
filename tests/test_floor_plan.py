"""What the floor plan promises about imports, seen from a fresh interpreter."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

HEAVY = {
    *("torch", "transformers", "tokenizers", "numpy", "pandas", "pyarrow", "matplotlib"),
    *("openai", "starlette", "uvicorn", "sqlite3"),
}


def imported_by(statement: str) -> set[str]:
    script = f"import sys\n{statement}\nprint(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True
    )
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert not imported_by("import agentlightning") & (
        HEAVY | {"aiohttp", "msgspec", "rich", "click", "jinja2"}
    )


@pytest.mark.parametrize(
    "statement",
    [
        "import agentlightning as agl; agl.rollout, agl.LitAgent, agl.LLM, agl.emit_reward, "
        "agl.Hook, agl.Runner",
        "import agentlightning.runner.runner",
        "import agentlightning.store.client",
        "import agentlightning.tracing.emit",
        "import agentlightning.cli.main, agentlightning.cli.server_commands, agentlightning.cli.training",
    ],
)
def test_the_agent_side_lives_without_torch_a_web_framework_or_sql(statement: str) -> None:
    assert not imported_by(statement) & HEAVY


def test_algorithms_and_the_data_layer_import_without_torch() -> None:
    assert not imported_by("import agentlightning.algorithm, agentlightning.data.sequences") & {
        "torch",
        "transformers",
    }


@pytest.mark.parametrize("folder", ["examples", "scripts", "benchmarks"])
def test_what_is_imported_of_the_package_elsewhere_exists(folder: str) -> None:
    """Examples run in environments of their own, which a fast test does not have."""
    missing = [
        f"{path.relative_to(ROOT)}: {node.module}.{name.name}"
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("agentlightning")
        for name in node.names
        if not exists(node.module or "", name.name)
    ]
    assert not missing


def exists(module: str, name: str) -> bool:
    found = importlib.import_module(module)
    return hasattr(found, name) or (
        hasattr(found, "__path__") and importlib.util.find_spec(f"{module}.{name}") is not None
    )
