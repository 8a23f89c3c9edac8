"""The one table of metrics and sites: every row is whole, and its default site is where the metric is found."""

import pandas as pd
import torch
from figures_helpers import table

import normlab
from normlab.analysis.compare import compare
from normlab.analysis.profiles import Profiles
from normlab.probes.metrics import ALL_METRICS, METRICS, SITES, metric_row


def test_rows_that_record_takes_have_a_statistic_and_the_others_are_of_the_model():
    for name, row in ALL_METRICS.items():
        assert row.name == name and row.default_site in SITES, name
        assert (name in METRICS) == (row.default_site != "model") == bool(row.statistic and row.readout), name


def test_record_finds_every_metric_at_its_default_site():
    shape = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    model = normlab.NormlabForCausalLM(normlab.NormlabConfig(scheme="bhyt", max_position_embeddings=16, **shape))
    ids = torch.randint(0, 64, (2, 16))
    with normlab.record(model, list(METRICS)) as rec:
        rec.backward(model(input_ids=ids, labels=ids).loss)
    found = rec.stats().to_pandas()
    assert set(found["site"]) <= set(SITES)
    at_default = {name for name, rows in found.groupby("metric") if ALL_METRICS[name].default_site in set(rows["site"])}
    without = ("router", "load", "streams", "sink")
    assert at_default == {name for name, row in METRICS.items() if row.kind not in without}
    assert list(dict.fromkeys(found["site"])) == [site for site in SITES if site in set(found["site"])]


def test_a_metric_that_is_not_in_the_table_is_shown_under_its_name():
    assert metric_row("my_metric").label == "my metric" and metric_row("my_metric").compared == "difference"


def test_sizes_are_compared_as_ratios_and_cosines_and_losses_as_differences():
    runs = table(depths=(4,))
    for metric, site, kind in (
        ("relative_contribution", "block", "ratio"),
        ("attention_entropy", "attn", "difference"),
    ):
        renamed = runs.replace({"metric": {"token_l2_mean": metric}})
        renamed.loc[renamed["metric"].eq(metric), "site"] = site
        found = compare(renamed, "bhyt", "lns", metric).iloc[0]
        assert found["kind"] == kind and found["seeds"] == 3, metric


def test_the_explorer_offers_a_metrics_default_site_first():
    runs = table(depths=(4,))
    moved = runs[runs["metric"].eq("grad_l2_mean")].assign(site="attn_norm_in_grad")
    moved = pd.concat([moved, runs], ignore_index=True)
    assert Profiles(moved).sites("grad_l2_mean") == ["block_in_grad", "attn_norm_in_grad"]
