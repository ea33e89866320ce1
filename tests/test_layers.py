"""The layers of the package, enforced by walking the imports.

nouns ← pure capabilities ← config, metrics, logs ← net, stores, pki ← shells (never one another) ← cli
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "llmgw"

NOUNS = {"request", "reasons", "errors", "endpoint", "hooks", "plugins", "units", "schema"}
PURE = {
    "openai",
    "kvcache",
    "routing",
    "admission",
    "pipeline",
    "tenancy",
    "placement",
    "control",
    "engines",
    "simengine",
}
GROUND = {"config", "metrics", "logs", "catalogue"}
NEAR = {"net", "stores", "pki"}
SHELLS = {"server", "agent", "ctl", "simengine.server"}
TOP = {"cli", "__main__", ""}

ORDER = [NOUNS, PURE, GROUND, NEAR, SHELLS, TOP]

FORBIDDEN_IN_PURE = {
    "trio", "socket", "select", "ssl", "asyncio", "threading", "subprocess", "httpx", "httpx2", "hypercorn", "starlette",
    "time", "datetime", "random", "os", "logging", "pathlib", "sqlite3", "zmq", "pynvml", "prometheus_client",
}  # fmt: skip
"""Purity: no I/O, no clock, no global chance. Names needed only for annotations go under TYPE_CHECKING."""


def modules() -> list[tuple[str, Path]]:
    return [
        (".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__").replace("__init__", ""), p)
        for p in sorted(ROOT.rglob("*.py"))
    ]


def part(module: str) -> str:
    """``net.pump`` → ``net``; a shell inside a capability is a part of its own."""
    return next((s for s in SHELLS if module == s or module.startswith(s + ".")), module.split(".", maxsplit=1)[0])


def level(module: str) -> int:
    found = [i for i, names in enumerate(ORDER) if part(module) in names]
    assert found, f"llmgw.{module} belongs to no layer: add it to tests/test_layers.py, after thinking where it belongs"
    return found[0]


def imports(path: Path) -> list[tuple[str, int]]:
    """Absolute names imported at run time, with lines; what stands under TYPE_CHECKING is left out."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for child in ast.walk(statement)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found += [(a.name, node.lineno) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write llmgw.…"
            base = node.module or ""
            found.append((base, node.lineno))
            found += [(f"{base}.{a.name}", node.lineno) for a in node.names]
    return found


@pytest.mark.parametrize(("module", "path"), modules(), ids=[m or "llmgw" for m, _ in modules()])
def test_imports_point_downwards(module: str, path: Path) -> None:
    mine = level(module)
    for name, line in imports(path):
        if not name.startswith("llmgw."):
            continue
        other = name.removeprefix("llmgw.")
        if not any((ROOT / Path(*other.split("."))).with_suffix(s).exists() for s in ("", ".py")):
            continue  # a name inside a module; the module itself is in the list too
        theirs = level(other)
        same_shell = mine == theirs and part(module) == part(other)
        assert theirs < mine or (theirs == mine and part(module) not in SHELLS) or same_shell, (
            f"{path}:{line}: {module or 'llmgw'} (layer {mine}) imports {other} (layer {theirs})"
        )


@pytest.mark.parametrize(
    ("module", "path"),
    [(m, p) for m, p in modules() if part(m) in NOUNS | PURE],
    ids=[m for m, _ in modules() if part(m) in NOUNS | PURE],
)
def test_pure_packages_import_no_world(module: str, path: Path) -> None:
    for name, line in imports(path):
        assert name.split(".")[0] not in FORBIDDEN_IN_PURE, f"{path}:{line}: {module} is pure, and imports {name}"


def test_no_await_in_augmented_assignment() -> None:
    """``x += f(await g())`` reads x before the await: updates made meanwhile are lost."""
    for _, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AugAssign):
                assert not any(isinstance(n, ast.Await) for n in ast.walk(node.value)), f"{path}:{node.lineno}"


def test_no_unbounded_channel() -> None:
    for _, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("open_memory_channel"):
                assert "inf" not in ast.unparse(node), f"{path}:{node.lineno}: a queue without a bound"
