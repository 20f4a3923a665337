"""The page that results of families become."""

from __future__ import annotations

from typing import Any

from .table import page, row

SPARSE, LEFT = ("sparse", ""), ("left", "why not")


def result(kind: str, *sites: tuple[int, str, str], **more: Any) -> dict[str, Any]:
    return {"family": "ours", "kind": kind, "attention": "sdpa", "sites": sites, **more}


def test_layers_that_agree_are_not_named() -> None:
    static = result("static", (0, *SPARSE), (1, *SPARSE), error=2e-7)
    dynamic = result("dynamic", (0, *LEFT), (1, *LEFT), error=0.0)
    assert row("ours", [static, dynamic]) == (
        "| ours | rewritten | left | dynamic: why not | 2e-07 | 2 |"
    )


def test_layers_that_differ_are_named() -> None:
    results = [result(kind, (0, *SPARSE), (1, *LEFT)) for kind in ("static", "dynamic")]
    assert row("ours", results) == (
        "| ours | partly: layer 0, not 1 | partly: layer 0, not 1 | layer 1: why not |  | 2 |"
    )


def test_attentions_that_differ_are_named() -> None:
    results = [result("static", (0, *SPARSE)), result("static", (0, *LEFT), attention="eager")]
    assert row("ours", results) == (
        "| ours | sdpa: rewritten, eager: left |  | static: why not |  | 2 |"
    )


def test_what_has_no_sites() -> None:
    results = [result("static", broken="it is wrong"), result("dynamic", failed=True)]
    assert row("ours", results) == "| ours | eager fails | **wrong** | static: it is wrong |  | 2 |"
    assert "| none |" in row("ours", [result("static")])


def test_rows_of_families_that_did_not_run_stay_unless_versions_changed() -> None:
    other = {**result("static", (0, *SPARSE)), "family": "another"}
    before = page([other], {"third": "no cache"})
    after = page([result("static", (0, *LEFT))], {}, before)
    assert "2 families" in after and "| `another` | rewritten |" in after and "third" not in after
    whole = "\n## The whole suite\n\nAll of it.\n"
    assert page([other], {}, before + whole) == page([other], {}, before) + whole
    newer = before.replace("and transformers", "and an older transformers")
    assert "another" not in page([result("static", (0, *LEFT))], {}, newer)
