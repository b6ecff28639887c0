"""The chart shows every model and figure of a report, and is the same for the same report."""

import xml.etree.ElementTree as ET

import pytest
from click.testing import CliRunner

pytest.importorskip("matplotlib")

from bench.chart import draw, main


def report(*names):
    ratio = {"prefill": {"median": 2.5, "low": 2.25, "high": 2.75},
             "decode": {"median": 1.25, "low": 1.125, "high": 1.5}}
    own = {"label": "Ignis", "is_peer": False, "ratio": ratio}
    peer = {"label": "llama.cpp", "is_peer": True}
    return {"machine": {"processor": "Some CPU", "date": "2026-01-01"},
            "plan": {"n_threads": 2, "n_prompt": 512, "n_decode": 128},
            "models": [{"model": name, "engines": [own, peer]} for name in names]}


def test_svg_holds_models_figures_and_machine(tmp_path):
    path = tmp_path / "chart.svg"
    draw(report("model-a", "model-b"), path)
    words = " ".join("".join(e.itertext()) for e in ET.parse(path).iter()
                     if e.tag.endswith("}text"))
    for expected in ("model-a", "model-b", "2.50×", "1.25×", "Some CPU", "prompt of 512 tokens"):
        assert expected in words, expected


def test_same_report_gives_the_same_bytes(tmp_path):
    draw(report("m"), tmp_path / "a.svg")
    draw(report("m"), tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_report_without_a_peer_cannot_be_drawn(tmp_path):
    alone = report("m")
    del alone["models"][0]["engines"][0]["ratio"]
    with pytest.raises(ValueError, match="no peer"):
        draw(alone, tmp_path / "chart.svg")


def test_command_reads_the_report(tmp_path):
    import json

    (tmp_path / "r.json").write_text(json.dumps(report("m")))
    result = CliRunner().invoke(main, [str(tmp_path / "r.json"), str(tmp_path / "c.png")])
    assert result.exit_code == 0 and (tmp_path / "c.png").read_bytes()[1:4] == b"PNG"
