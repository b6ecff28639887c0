"""The web page in a real browser: passes to click through, values to hover, no network.

What would be broken: the page is for people to look at, and a script error leaves it blank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ignis.gguf import open_gguf
from ignis.graph.ir.printer import body_lines
from ignis.inspect import Compilation, inspect_model
from ignis.inspect.page import page_data, write_page
from ignis.native.host import host_target
from tests.compiler.browser import Browser, find_browser
from tests.random_models import write_random_model


def made_up_profile(compilation: Compilation) -> dict[str, Any]:
    """Each launch takes 2 microseconds where the ceilings allow one, and one at each barrier."""
    plan = compilation.plan(1, 1)
    launches = [
        {"seconds": 2e-6, "wait": 1e-6 * plan.timetable.barrier_after(i), "least": 1e-6}
        for i in range(len(plan.launches))
    ]
    return {
        "threads": 2,
        "ceilings": {"bandwidth_gb_s": 30.0, "int8_gmac_s": 400.0, "f32_gmac_s": 100.0},
        "phases": [{"name": "decode", "n_tokens": 1, "n_past": 77, "runs": 3, "seconds": 3e-6,
                    "launches": launches,
                    "groups": [{"label": "matmul attn_q", "kernel": "matmul_packed", "launches": 2,
                                "seconds": 2e-6, "least": 1e-6, "nbytes": 10_000, "macs": 20_000,
                                "int8": True}]}],
    }  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a model whose name tries to end the script element."""
    folder = tmp_path_factory.mktemp("page")
    model = write_random_model(folder / "<b>&'.gguf", architecture="qwen2", n_layers=3)
    with open_gguf(model) as file:
        compilation = inspect_model(file, check=True)
    path = folder / "report.html"
    write_page(compilation, path, host_target(), made_up_profile(compilation))
    return path


@pytest.fixture(scope="module")
def browser(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium here")
    with Browser.start(path, tmp_path_factory.mktemp("browser")) as started:
        started.open(page)
        yield started


def test_the_page_is_one_file(page: Path) -> None:
    text = page.read_text()
    for outside in ("http://", "https://", "<link", "src=", "import("):
        assert outside not in text.replace("http://www.w3.org/2000/svg", "")
    assert text.count("<script") == 2 and "<b>&'" not in text
    assert len(text) < 1_000_000


def test_scripts_run_and_nothing_is_fetched(browser: Browser) -> None:
    assert browser.errors == []
    assert all(url.startswith(("file:", "about:")) for url in browser.requests)
    assert browser.evaluate("document.getElementById('title').textContent") == "inside <b>&'.gguf"
    assert "57 → 42" in browser.evaluate("document.getElementById('cards').textContent")


def test_clicking_through_the_passes(browser: Browser) -> None:
    """Each pass shows its graphs; stepping marks what went and what came."""
    for name, removed, added in (("fuse_norm", 2, 1), ("rope_store", 3, 2), ("fuse_qkv", 3, 1),
                                 ("layout", 1, 1), ("schedule_steps", 0, 1)):  # fmt: skip
        browser.click(f"button[data-pass={name}]")
        pressed = "document.querySelector('[aria-pressed=true]').dataset.pass"
        assert browser.evaluate(pressed) == name
        assert name in browser.evaluate("document.getElementById('after-title').textContent")
        browser.click("#next")
        assert "rewrite 1 of" in browser.evaluate("document.getElementById('where').textContent")
        marked = [browser.evaluate(f"document.querySelectorAll('#{side} .op.now').length")
                  for side in ("before", "after")]
        assert marked == [removed, added], name
    browser.click("#previous")
    assert browser.evaluate("document.querySelectorAll('.op.now').length") == 0
    browser.click("button[data-pass=dead_code]")
    assert browser.evaluate("document.getElementById('next').disabled")


def test_layouts_and_barriers_are_shown(browser: Browser) -> None:
    """What two passes write into the text of the graph, and nothing but that."""
    browser.click("button[data-pass=layout]")
    opened = browser.evaluate("document.querySelector('#after details.weights').innerText")
    assert "@blk.0.attn_q.weight: q8_0[128,64] panels" in opened
    assert "panels" not in browser.evaluate("document.getElementById('before').textContent")
    browser.click("button[data-pass=schedule_steps]")
    lines = browser.evaluate("[...document.querySelectorAll('#after > .op')].map(n => n.innerText)")
    assert lines[0] == "repeat %x = embedding" and lines[1].startswith("repeat %1 = rmsnorm(%x")
    assert lines.count("barrier") >= 5 and "barrier if T > 1" in lines
    browser.click("#next")
    browser.click("#next")
    assert browser.evaluate("document.querySelector('#after .now').innerText").startswith("repeat")


def test_folded_layers_open(browser: Browser) -> None:
    for inside in ("", "details.fold "):
        browser.click(f"#after {inside}details.fold > summary")
        # Browsers tell of a fold that opened with the next frame.
        browser.evaluate("new Promise(done => setTimeout(done, 60))")
    shown = "document.querySelectorAll('#after details.fold details.fold .op').length"
    assert browser.evaluate(shown) > 10


def test_a_tooltip_names_the_value(browser: Browser) -> None:
    browser.hover("#shared rect.value")
    tip = browser.evaluate("document.getElementById('tooltip').innerText")
    assert "f32[T," in tip and "at offset" in tip and "written by" in tip
    display = "getComputedStyle(document.getElementById('tooltip')).display"
    assert browser.evaluate(display) == "block"


def test_each_step_has_its_time_against_the_roofline(browser: Browser) -> None:
    heads = browser.evaluate("document.getElementById('step-table').rows[0].innerText")
    assert "µs" in heads and "of the roofline" in heads
    table = browser.evaluate("document.getElementById('step-table').innerText")
    assert "step 0, with 1.0 µs at its barrier" in table and "50 %" in table
    assert "behind 77 positions" in browser.evaluate(
        "document.getElementById('steps-lead').textContent")  # fmt: skip
    n_launches = browser.evaluate("document.querySelectorAll('#timeline g.time').length")
    assert n_launches == browser.evaluate(
        "data.plans[0].step_list.reduce((n, step) => n + step.launches.length, 0)")  # fmt: skip
    tip = "document.getElementById('tooltip').innerText"
    browser.hover("#timeline g.time[data-label='matmul ffn_down']")
    shown = browser.evaluate(tip)
    assert "matmul ffn_down" in shown and "2.0 µs; the ceilings allow 1.0 µs: 50 %" in shown
    assert "then 1.0 µs at the barrier" in shown
    browser.hover("#profile circle.dot")
    assert "50 % of the roofline" in browser.evaluate(tip)


def test_plans_steps_and_profile(browser: Browser) -> None:
    rows = "document.getElementById('step-table').rows.length"
    decode = browser.evaluate(rows)
    browser.evaluate("(() => { const c = document.getElementById('plan-choice'); c.value = 2;"
                     " c.onchange(); })()")
    assert browser.evaluate(rows) != decode or browser.evaluate(
        "document.getElementById('own-part').style.display") == "none"
    assert "matmul attn_q" in browser.evaluate("document.getElementById('profile').textContent")
    assert "50 %" in browser.evaluate("document.getElementById('profile').textContent")


def test_the_data_agrees_with_the_plan(tmp_path: Path) -> None:
    """The picture is drawn from these rectangles: they must be the plan's."""
    path = write_random_model(tmp_path / "m.gguf", formats=("q4_0",))
    with open_gguf(path) as file:
        compilation = inspect_model(file)
    data = page_data(compilation, host_target())
    memory = compilation.plan(1, 1).memory
    drawn = [v for part in ("shared", "own") for v in data["plans"][0][part]["values"]]
    assert {v["name"]: v["offset"] for v in drawn} == {
        str(value): offset for value, offset in memory.offsets.items()
    }
    assert len(data["plans"][0]["step_list"]) == compilation.plan(1, 1).timetable.n_steps
    assert sum(n_ops for _, _, n_ops in data["stages"][-1]["layers"]) == len(
        compilation.graph.operations)
    shown = [data["lines"][line] for _, lines, _ in data["stages"][-1]["layers"] for line in lines]
    assert shown[1:] == [line for block in body_lines(compilation.graph) for line in block]
