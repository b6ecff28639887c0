"""If these break, the README's table of file types is not what was measured."""

import json

import pytest
from click.testing import CliRunner

from bench.engines import Plan
from bench.format_table import markdown, put_into_readme, shown_in_readme
from bench.formats import Scope, Text, default_text, main, measure_model
from ignis.errors import UsageError
from tests.conftest import REPOSITORY
from tests.random_models import write_random_model

TEXT = "The rest of the text is that of the other runs in the end, and so on and on. " * 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Rows of 256: blocks of every format divide them."""
    folder = tmp_path_factory.mktemp("formats")
    return write_random_model(folder / "m.gguf", formats=("f32",), n_embd=256, n_ff=256,
                              n_heads=8)


@pytest.fixture
def run(model, tmp_path):
    """The command without speed, on short text; the result, and the report."""
    def run(*arguments, text=TEXT):
        (tmp_path / "text.txt").write_text(text)
        result = CliRunner().invoke(main, [
            "--model", str(model), "--text", str(tmp_path / "text.txt"), "--ctx", "64",
            "--windows", "2", "--threads", "1", "--no-speed", "--folder", str(tmp_path / "made"),
            "--json", str(tmp_path / "f.json"), "--markdown", str(tmp_path / "f.md"), *arguments])
        path = tmp_path / "f.json"
        return result, json.loads(path.read_text()) if path.exists() else None
    return run


def test_types_are_made_and_compared(run, tmp_path):
    result, report = run("--type", "f16", "--type", "q8_0", "--type", "q4_k_m", "--type", "q2_k")
    assert result.exit_code == 0, result.output
    rows = report["rows"]
    assert [row["type"] for row in rows] == ["f32", "f16", "q8_0", "q4_k_m", "q2_k"]
    sizes = [row["bytes"] for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    divergences = [row["base"]["kl"]["value"] for row in rows]
    assert divergences == sorted(divergences) and abs(divergences[0]) < 1e-7 < divergences[1]
    assert all(row["windows"] == 2 and row["fallbacks"] == 0 for row in rows)
    assert report["text"] == {"name": "text.txt", "bytes": len(TEXT),
                              "sha256": report["text"]["sha256"]}
    table = (tmp_path / "f.md").read_text()
    assert result.output.strip() in table and "| Q4_K_M |" in table and "prefill" not in table
    assert not list((tmp_path / "made").iterdir()), "models that were made stay"


def test_speed_is_that_of_the_file(model, tmp_path):
    plan = Plan(n_threads=1, n_prompt=16, n_decode=4, n_repeats=2, min_seconds=0)
    scope = Scope(Text("text", TEXT), 64, 1, 1, plan)
    told = []
    (row,) = measure_model(str(model), [], scope, tmp_path, told.append)
    assert len(row.figures.prefill) == 2 and min(row.figures.decode) > 0
    assert set(row.as_json()["speed"]) == {"prefill", "decode"}
    assert not list(tmp_path.iterdir())


def test_too_short_a_text_is_one_line(run):
    result, report = run("--type", "f16", text="of the")
    assert result.exit_code == 1 and report is None
    assert result.output.splitlines()[-1].startswith("error: the text is too short")


def test_the_default_text_is_always_there():
    assert len(default_text().text) > 200_000


ROW = {"model": "m", "type": "q8_0", "bytes": 3 << 20, "bits_per_weight": 8.5,
       "speed": {"prefill": {"median": 1234.5}, "decode": {"median": 56.78}}, "windows": 4,
       "perplexity": {"value": 12.3456, "error": 0.25},
       "base": {"kl": {"value": 0.000123, "p99.9": 0.0356}, "same_top": {"value": 0.987}}}
REPORT = {"machine": {"processor": "P", "date": "D"}, "rows": [ROW],
          "text": {"name": "T"}, "plan": {"n_ctx": 64, "n_prompt": 5, "n_decode": 6,
                                          "n_threads": 2}}


def test_cells_have_the_digits_that_count():
    row = "| Q8_0 | 3.0 | 8.50 | 1234 | 56.8 | 12.346 ± 0.250 | 1.2e-04 | 0.036 | 98.7 % |"
    text = markdown(REPORT)
    assert row in text and "Text: T, 4 windows of 64 tokens" in text


def test_the_readme_gets_the_table_between_its_markers(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- formats -->\nold\n<!-- end of formats -->\nafter\n")
    for _ in range(2):
        put_into_readme(readme, "new\n")
        text = readme.read_text()
        assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
        assert shown_in_readme(text) == "new\n"
    readme.write_text("nothing")
    with pytest.raises(UsageError, match="no place for the table"):
        put_into_readme(readme, "new\n")

def test_the_readme_shows_the_report():
    report = json.loads((REPOSITORY / "docs" / "formats.json").read_text())
    assert shown_in_readme((REPOSITORY / "README.md").read_text()) == markdown(report)
    assert markdown(report) in (REPOSITORY / "docs" / "formats.md").read_text()
