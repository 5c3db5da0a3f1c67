"""No text from outside is ever parsed as markup: the rule checked over the program's source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import dspark_tui

ROOT = Path(dspark_tui.__file__).parent
NEED_MARKUP_FALSE = {"Static", "Label", "OptionList", "notify", "MarkdownTableCellContents"}
FORBIDDEN_CALLS = {"Button", "Select", "Collapsible", "Tab", "Tabs", "TabPane", "RichLog", "Tooltip", "panic"}
FORBIDDEN_CALLS |= {"from_markup", "with_tooltip", "markup"}
FORBIDDEN_ATTRIBUTES = {"tooltip", "border_title", "border_subtitle"}
NEED_CONTENT = {"Option"}


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def says_no_markup(call: ast.Call) -> bool:
    return any(
        keyword.arg == "markup" and isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        for keyword in call.keywords
    )


def problems(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = name_of(node.func)
            if name in NEED_MARKUP_FALSE and not says_no_markup(node):
                yield f"line {node.lineno}: {name} without markup=False"
            if name in FORBIDDEN_CALLS:
                yield f"line {node.lineno}: {name} parses markup"
            if name in NEED_CONTENT and isinstance(node.args[0], ast.Constant | ast.JoinedStr):
                yield f"line {node.lineno}: {name} takes a string; give it Content"
            if name == "__init__" and isinstance(node.func, ast.Attribute) and node.keywords:
                continue
        if (
            isinstance(node, ast.Attribute | ast.AnnAssign)
            and getattr(node, "attr", "") in FORBIDDEN_ATTRIBUTES
        ):
            yield f"line {node.lineno}: .{getattr(node, 'attr', '')} parses markup"
        if isinstance(node, ast.ClassDef):
            yield from subclass_problems(node)


def subclass_problems(node: ast.ClassDef) -> Iterator[str]:
    """A subclass of Static must turn markup off in its own __init__."""
    if not {name_of(base) for base in node.bases} & {"Static", "Label"}:
        return
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and name_of(n.func) == "__init__"]
    if not any(says_no_markup(call) for call in calls):
        yield f"line {node.lineno}: class {node.name} leaves markup on"


def test_the_source_has_no_markup() -> None:
    found = [
        f"{path.relative_to(ROOT)} {problem}"
        for path in ROOT.rglob("*.py")
        if "engine" not in path.parts
        for problem in problems(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


def test_the_check_sees_what_it_should() -> None:
    bad = [
        'Static("x")',
        "self.notify(t)",
        "Content.from_markup(t)",
        "w.tooltip = t",
        'Option("x")',
        "class A(Static): pass",
    ]
    for line in bad:
        assert len(list(problems(ast.parse(line)))) == 1, line
    assert not list(problems(ast.parse('Static("x", markup=False)\nOption(content)')))
