"""The shipped calibration against published runs: every third configuration, and the ordinary rows of memory."""

from collections import defaultdict
from pathlib import Path

import numpy as np

from benchmarks.accuracy.fit_published import configurations
from benchmarks.accuracy.memory import held, special
from benchmarks.accuracy.pricing import Pricer
from benchmarks.accuracy.published import read_published
from cost_models.calibrations import shipped


def test_step_times(shared: Path) -> None:
    table = read_published(shared / "published" / "throughput.csv", shipped())
    assert len(table.rows) + len(table.apart) + len(table.refused) == 706
    assert not table.refused
    some = configurations(table.rows)[::3]
    logs = Pricer().logs([one.run for one in some], shipped()) - np.log([one.measured_s for one in some])
    by_source: dict[str, list[float]] = defaultdict(list)
    for one, log in zip(some, logs, strict=True):
        by_source[one.source].append(abs(np.expm1(log)))
    assert len(by_source) == 7
    medians = {source: float(np.median(errors)) for source, errors in by_source.items()}
    assert max(medians.values()) < 0.07, medians
    assert np.mean(list(medians.values())) < 0.045, medians


def test_memory_of_the_ordinary_rows_of_megatron_core(shared: Path) -> None:
    table = read_published(shared / "published" / "memory.csv", shipped(), memory=True)
    rows = [row for row in table.rows if row.source.startswith("Megatron-LM CI") and not special(row)]
    for experts, least, median, p90 in ((False, 100, 0.015, 0.07), (True, 20, 0.045, 0.09)):
        errors = [abs(np.expm1(held(row).log)) for row in rows if bool(row.row["experts"]) is experts]
        assert len(errors) > least
        assert np.median(errors) < median
        assert np.quantile(errors, 0.9) < p90
