"""The comparison is fair: turns alternate, the idle engine rests, ratios are of the same turn."""

import json
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import compare as comparing
from bench.compare import as_json, compare
from bench.engines import EngineSpec, Plan, Worker, WorkerError, llama_specs
from bench.report import Comparison, Figures, footer, markdown, tables
from bench.worker import measure

PLAN = Plan(n_threads=1, n_prompt=16, n_decode=4, n_repeats=2, min_seconds=0)


def fake(label, kind, seconds=0.001):
    command = (sys.executable, "-m", "tests.bench.fake_worker", kind, str(seconds))
    return EngineSpec(label, command, is_peer=kind != "own")


@pytest.fixture(scope="module")
def comparison():
    told = []
    specs = [fake("Ignis", "own"), fake("fast", "peer", 0.01), fake("slow", "peer", 0.03)]
    result = compare("m", 123, specs, PLAN, told.append)
    return result, told


def test_order_turns_round_between_repetitions(comparison):
    _, told = comparison
    turns = [line.split(", ")[1] for line in told if ", " in line]
    assert turns[-6:] == ["Ignis", "fast", "slow", "slow", "fast", "Ignis"]


def test_ratio_is_against_the_better_setting(comparison):
    result, _ = comparison
    assert result.best_peer("prefill").label == "fast"
    ratio = result.ratio(result.own[0], "decode")
    assert 1.5 < ratio.median < 12 and ratio.low <= ratio.median <= ratio.high


def test_agreement_compares_logits(comparison):
    assert comparison[0].agreement == {"fast": pytest.approx(1), "slow": pytest.approx(1)}


def test_report_is_json_with_every_turn(comparison):
    report = json.loads(json.dumps(as_json([comparison[0]], PLAN)))
    own, fast, _ = report["models"][0]["engines"]
    assert report["plan"]["n_prompt"] == 16 and report["machine"]["cores"] > 0
    assert len(own["turns"]["decode"]) == 2 and set(own["ratio"]) == {"prefill", "decode"}
    assert "ratio" not in fast and fast["share"] == {}


def test_tables_have_a_row_a_model(comparison):
    text = markdown([comparison[0]], PLAN)
    assert footer([comparison[0]]) == "ceilings: 100.0 GB/s, 1000 int8 GMAC/s, 50 f32 GMAC/s"
    lines = text.splitlines()
    assert lines[0] == "| prefill | Ignis | of arithmetic | fast | slow | ratio |"
    assert all(line.count("|") == 7 for line in lines if line) and " x (" in lines[2]
    assert [table.row_count for table in tables([comparison[0]], PLAN)] == [1, 1]


def test_shares_and_ratios_are_of_the_same_turn():
    work = {"int8_macs": 10**9, "f32_macs": 0, "weight_nbytes": 10**9, "kv_nbytes": 0}
    own = Figures("Ignis", False, {"work": {"prefill": work, "decode": work}})
    peer = Figures("peer", True, {})
    for slowness in (1.0, 4.0, 2.0):     # the machine, for all engines and ceilings alike
        ceilings = {"bandwidth_gb_s": 10 / slowness, "int8_gmac_s": 40 / slowness,
                    "f32_gmac_s": 1.0}
        # Before and after; what disturbs the measuring only lowers it.
        disturbed = {name: 0.7 * value for name, value in ceilings.items()}
        own.add({"prefill_s": 0.05 * slowness, "decode_s": 0.5 * slowness,
                 "ceilings": [disturbed, ceilings]}, PLAN)
        peer.add({"prefill_s": 0.1 * slowness, "decode_s": 1.5 * slowness, "ceilings": []}, PLAN)
    result = Comparison("m", 1, [own, peer])
    assert result.ratio(own, "prefill").low == result.ratio(own, "prefill").high == 2
    assert result.ratio(own, "decode").median == pytest.approx(3)
    # A second's work at 40 G/s is 25 ms of 50; a token's 1 GB at 10 GB/s is 100 ms of 125.
    assert own.share("prefill", PLAN).high == pytest.approx(0.5)
    assert own.share("decode", PLAN).low == pytest.approx(0.8)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_idle_engine_is_stopped():
    with Worker(fake("Ignis", "own")) as worker:
        for _ in range(2):
            stat = Path(f"/proc/{worker.pid}/stat")
            wait_for(lambda stat=stat: stat.read_text().rsplit(")", 1)[1].split()[0] == "T")
            worker.measure(PLAN)
    assert not stat.exists()


def wait_for(condition):
    """A signal is delivered soon, not at once."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_failures_name_the_engine_and_the_reason():
    with pytest.raises(WorkerError, match="peer: no such model"):
        Worker(fake("peer", "broken"))
    with (Worker(fake("peer", "crash")) as worker,
          pytest.raises(WorkerError, match="ended with code 7: got Segmentation fault")):
        worker.measure(PLAN)
    with pytest.raises(WorkerError, match="cannot start it"):
        Worker(EngineSpec("peer", ("/no/such/python",), is_peer=True))


def test_missing_bindings_are_one_line():
    try:
        import llama_cpp  # noqa: F401
    except ImportError:
        with pytest.raises(WorkerError, match="install the extra 'peers', or give --peer-python"):
            Worker(llama_specs(Path("m.gguf"), PLAN, sys.executable)[0])


def test_runs_repeat_until_the_time_is_full():
    class Engine:
        n_vocab = 10
        n_fed = 0

        def clear(self): ...

        def feed(self, ids):
            self.n_fed += 1
            time.sleep(0.0005)

    once, often = Engine(), Engine()
    measure(once, 4, 2, 0.0)
    measure(often, 4, 2, 0.02)
    assert once.n_fed == 1 + 1 + 2 < often.n_fed


def test_command_writes_report_and_table(monkeypatch, tmp_path):
    model = tmp_path / "m.gguf"
    model.write_bytes(b"x")
    monkeypatch.setattr(comparing, "ignis_spec", lambda *_: fake("Ignis", "own"))
    monkeypatch.setattr(comparing, "llama_specs", lambda *_: [fake("llama.cpp", "peer")])
    out = tmp_path / "out.json"
    arguments = [str(model), "--repeat", "1", "--min-seconds", "0", "-n", "2", "--threads", "1",
                 "--json", str(out)]
    result = CliRunner().invoke(comparing.main, arguments)
    assert result.exit_code == 0, result.output
    assert "prefill 512, tokens/s, 1 threads" in result.output
    assert json.loads(out.read_text())["models"][0]["best_peer"]["decode"] == "llama.cpp"
    monkeypatch.setattr(comparing, "llama_specs", lambda *_: [fake("llama.cpp", "broken")])
    result = CliRunner().invoke(comparing.main, arguments)
    assert result.exit_code == 1
    assert "error: llama.cpp: no such model" in result.output
