"""The fine-tuning benchmark's processes work at toy size, so that it cannot rot."""

import pytest


@pytest.fixture
def benches():
    """The benchmarks of fine-tuning, which import PEFT."""
    pytest.importorskip("peft", reason="fine-tuning needs the `finetune` extra")
    from tandem.bench import finetune, finetune_memory

    return finetune, finetune_memory


@pytest.mark.slow
def test_quick_cases_check_and_compare(benches, monkeypatch):
    """One format and one rival: losses agree, and each case gives tokens/s or memory."""
    finetune, _ = benches
    monkeypatch.setattr(finetune, "IMPLEMENTATIONS", ("eager",))
    monkeypatch.setattr(finetune, "FORMATS", {"int8+int8": 1e-2})
    units = []
    for case in finetune.make_cases(quick=True):
        assert case.check() == "ok"
        assert case.ours() > 0
        assert all(measure() > 0 for measure in case.rivals.values())
        units.append(case.unit)
    assert units == ["tok/s", "GB", "GB"]


@pytest.mark.slow
def test_the_quick_memory_case_predicts_its_run(benches):
    """Both processes work, and the toy's peak, most of it libraries, is as predicted."""
    _, finetune_memory = benches
    for case in finetune_memory.make_cases(quick=True):
        assert case.check() == "ok"
        assert case.ours() == pytest.approx(case.baseline(), rel=finetune_memory.BOUND)
