"""Every benchmark runs on a CPU with sizes that take little time, and returns figures."""

from pathlib import Path

import bench_engine
import bench_job_layer
import bench_kernels
import pytest
from measuring import DEVICE, run_mode
from modes import turns

ON_CPU = pytest.mark.skipif(DEVICE.type == "cuda", reason="the sizes are for a CPU")
SMALL = ["--kv-cache-gib", "0.02"]
ENGINE: dict[str, list[str]] = {
    "throughput": [
        *("--model", "tiny-moe", "--workload", "smoke", "--routing", "uniform", "--requests", "3"),
        *("--max-model-len", "256", "--max-num-seqs", "4", *SMALL),
    ],
}


@pytest.mark.quick(1)
@ON_CPU
@pytest.mark.parametrize("mode", ENGINE)
def test_modes_of_the_engine(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    found = run_mode("", bench_engine.MODES, [mode, *ENGINE[mode], "--json", str(path)])
    assert found and f'"mode": "{mode}"' in path.read_text()


@ON_CPU
@pytest.mark.slow
def test_two_ranks() -> None:
    arguments = ["--model", "tiny-moe", "--workload", "smoke", "--cache-gib", "0.05"]
    arguments += ["--ranks", "1,2", "--runs", "2"]
    one, two = run_mode("", bench_engine.MODES, ["tensor-parallel", *arguments])
    assert one["times"] == 1 and two["times"] > 0
    assert len(one["runs"]) == len(two["runs"]) == 2 and two["ready_seconds"] > 0


@ON_CPU
@pytest.mark.slow
def test_the_price_of_equal_bits() -> None:
    """Models of a mixture, whose experts are chosen by chance, and of block diffusion are timed."""
    arguments = ["--models", "tiny-moe,tiny-sdar", "--layers", "1", "--requests", "2"]
    arguments += ["--workloads", "smoke", "--rounds", "2", "--cache-gib", "0.02"]
    found = run_mode("", bench_engine.MODES, ["price", *arguments])
    assert [each["model"] for each in found] == ["tiny-moe", "tiny-sdar"]
    assert all(len(each["A"]) == len(each["B"]) == 2 for each in found)


@ON_CPU
@pytest.mark.slow
def test_the_price_with_pictures_and_of_scores() -> None:
    arguments = ["--models", "tiny-vl", "--layers", "0", "--requests", "2", "--rounds", "1"]
    arguments += ["--workloads", "smoke", "--cache-gib", "0.05"]
    for option in ("--pictures", "--scored"):
        (found,) = run_mode("", bench_engine.MODES, ["price", *arguments, option])
        assert found["A"][0] > 0 and found["B"][0] > 0


@ON_CPU
@pytest.mark.slow
def test_the_table_beside_another_tree(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--models", "tiny,tiny-moe", "--layers", "1", "--requests", "2"]
    arguments += ["--cache-gib", "0.02", "--rounds", "2", "--beside", str(turns.HERE)]
    found = run_mode("", bench_engine.MODES, ["table", *arguments])
    assert [each["line"] for each in found] == ["tiny", "tiny-moe"]
    assert all(len(runs) == 2 for each in found for runs in each["turns"])
    assert "| tiny-moe, smoke |" in capsys.readouterr().out


@ON_CPU
@pytest.mark.thorough
def test_the_cost_of_unmasking_rules() -> None:
    """Rules with a number of steps unmask as many tokens as they say, but for the last block that
    the row's end cuts; the others get confidences that pass their thresholds."""
    arguments = ["--model", "tiny-sdar", "--workload", "smoke", "--requests", "2", "--runs", "1"]
    arguments += ["--shared", "8", "--in-flight", "2", "--kv-cache-gib", "0.02"]
    found = run_mode("", bench_engine.MODES, ["unmasking", *arguments])
    forced = {each["rule"]: each["tokens_per_forward"] for each in found}
    assert len(forced) == 7 and all(each["step_ms"] > 0 for each in found)
    for count in (1, 2, 4):
        assert 0.9 * count < forced[f"low_confidence_static, {count} a step"] <= count
    assert 1 < forced["low_confidence_dynamic"] < 4


@pytest.mark.quick(1)
def test_prices_are_of_medians() -> None:
    found = turns.compared([2.0, 1.0, 4.0], [3.0, 2.2, 1.0])
    assert found["difference"] == pytest.approx(0.1) and found["spread"] == pytest.approx(1.5)


@pytest.mark.thorough
def test_the_job_layer() -> None:
    arguments = ["job", "--rows", "10400", "--grade", "--warm-up-rows", "10"]
    try:
        assert run_mode("", bench_job_layer.MODES, arguments)
    except SystemExit as error:  # memory is that of a busy machine
        assert error.code


@pytest.mark.thorough
@ON_CPU
@pytest.mark.parametrize("section", bench_kernels.SECTIONS)
def test_kernels(section: str) -> None:
    found = bench_kernels.main([section, "--tiny"])
    assert found and all("us" in case or "cuBLAS" in case["name"] for case in found)
