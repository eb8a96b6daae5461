"""Table 1 of DEFT: words follow from rows, and a row that differs is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from papers.deft import table as deft_table
from papers.deft.setting import TUNED
from papers.frame import Ask, Row
from tests.papers.test_deft import LSTM

pytestmark = pytest.mark.slow


def as_printed() -> list[Row]:
    """Rows whose words are all the paper's."""
    figures = {"yes": 1.0, "no": 0.0, "very high": 1.0, "low": 0.2, "very low": 0.05}
    return [
        {"name": name, **{one.key: figures[one.paper[place]] for one in deft_table.COLUMNS}}
        for place, name in enumerate(deft_table.SPARSIFIERS)
    ]


@pytest.mark.parametrize("column", deft_table.COLUMNS, ids=lambda one: one.key)
def test_a_column_agrees_where_all_its_words_do(column: deft_table.Column) -> None:
    rows = as_printed()
    claim = deft_table._claim(column, rows)
    assert (claim.agrees, claim.why) == (True, "")
    changed: Row = {**rows[0], column.key: 0.2 if column.paper[0] == "very high" else 1.0}
    changed[column.key] = 0.0 if column.paper[0] == "yes" else changed[column.key]
    claim = deft_table._claim(column, [changed, *rows[1:]])
    assert claim.agrees is False
    assert claim.why.startswith("not topk: ")


def test_words_are_measured(tmp_path: Path) -> None:
    ask = Ask(quick=True, report=lambda fraction, what: None, earlier={}, folder=tmp_path)
    found = deft_table.table1(ask, app=LSTM, repeats=2)
    rows = {str(row["name"]): row for row in found.rows}
    assert tuple(rows) == deft_table.SPARSIFIERS
    built_up, _, tuning, idling, *_ = found.claims
    assert len(found.claims) == len(deft_table.COLUMNS)
    assert tuning.agrees is True
    assert "cltk yes" in idling.ours
    assert "topk yes" in built_up.ours
    assert rows["topk"]["cost_of_topk"] == 1.0
    assert float(str(rows["deft"]["overhead_s"])) > float(str(rows["deft"]["norms_s"])) > 0
    assert float(str(rows["cltk"]["fraction_idle"])) > 0.3
    assert rows[TUNED]["without_density"] == 1.0
