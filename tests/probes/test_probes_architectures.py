"""The probes on every class that transformers maps for five tasks: the committed audit, a fast sample of it, all of it.

`python -m benchmarks.architecture_audit data/bench/architectures.csv` writes the table.
"""

from pathlib import Path

import pandas
import pytest
import transformers

from benchmarks.architecture_audit import COLUMNS, audit, rows_of
from benchmarks.architecture_zoo import TASKS, class_names
from normlab.probes import call_tokens

TABLE = Path(__file__).parents[2] / "data" / "bench" / "architectures.csv"
SAMPLE = 6
SLOW = {"EfficientNetForImageClassification", "TextNetForImageClassification"}  # tens of seconds each
BETWEEN_STAGES = ("image", "ConvNextForImageClassification", "measured")  # norms run before the last block is known
MOST_NOT_BUILT = 54  # classes that cannot be built small from their configuration alone; the table says why of each

pinned = pytest.mark.skipif(not TABLE.is_file(), reason="the audit is not in this checkout")


@pytest.fixture(scope="module")
def table() -> pandas.DataFrame:
    return pandas.read_csv(TABLE, keep_default_na=False)


@pinned
def test_the_audit_lists_every_mapped_class_and_nothing_in_it_is_silently_wrong(table):
    assert list(table.columns) == COLUMNS
    assert set(table["status"]) <= {"measured", "partly", "refused", "not built"}
    reported = table[table["status"] != "measured"]
    assert (reported["reason"].str.len() > 10).all()
    assert (table.loc[table["status"].isin(["measured", "partly"]), "identical"].astype(str) == "True").all()
    assert (table["status"] == "not built").sum() <= MOST_NOT_BUILT
    if set(table["transformers"]) == {transformers.__version__}:
        expected = {(task, name) for task in TASKS for name in class_names(task)}
        assert set(zip(table["task"], table["class"], strict=True)) == expected


def sample() -> list[tuple[str, str, str]]:
    """(task, class, status) of classes spread evenly over those that were built."""
    if not TABLE.is_file():
        return []
    table = pandas.read_csv(TABLE, keep_default_na=False)
    rows = table[(table["status"] != "not built") & (table["transformers"] == transformers.__version__)]
    rows = rows[~rows["class"].isin(SLOW)]
    chosen = rows.iloc[:: max(1, len(rows) // SAMPLE)].head(SAMPLE)
    return list(zip(chosen["task"], chosen["class"], chosen["status"], strict=True))


@pytest.mark.parametrize(("task", "name", "status"), [*sample(), BETWEEN_STAGES], ids=lambda value: str(value))
def test_a_sample_of_architectures_is_as_the_audit_has_it(task, name, status):
    row = audit(task, name)
    assert row["status"] == status, row["reason"]


@pytest.mark.parametrize("fault", ["padding counts", "the first token counts"])
def test_the_audit_sees_a_fault_of_the_recorder(fault, monkeypatch):
    masks = call_tokens.token_masks

    def faulty(mask, *rest, **named):
        right = masks(None if fault == "padding counts" else mask, *rest, **named)
        return right if fault == "padding counts" else right[:1].expand_as(right)

    monkeypatch.setattr(call_tokens, "token_masks", faulty)
    row = audit("causal", "LlamaForCausalLM")
    assert row["status"] == "wrong" and "block_out" in row["reason"], row


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_architecture_is_as_the_audit_has_it(table, tmp_path):
    rows = pandas.DataFrame(rows_of(set()), columns=COLUMNS)
    rows.to_csv(tmp_path / "architectures.csv", index=False)
    both = rows.merge(table, on=["task", "class"], suffixes=("", "_committed"))
    changed = both[both["status"] != both["status_committed"]]
    assert len(both) == len(rows) and changed.empty, changed[["task", "class", "status", "reason"]].to_string()
