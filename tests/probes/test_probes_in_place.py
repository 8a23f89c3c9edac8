"""Blocks that write into the stream in place, by ways that PyTorch counts and others."""

import pytest
import torch
from probe_toys import PreLN, Stack, X
from probe_zoo import near, values

from normlab.probes import record


class Adds(PreLN):
    def add(self, h, norm, part):
        h += part(norm(h))
        return h


class AddsUncounted(PreLN):
    """As a Triton kernel would."""

    def add(self, h, norm, part):
        h.data += part(norm(h))
        return h


def calls(kind, metrics, mode):
    with record(Stack(kind, kind), metrics, masks=["all"]) as recorder, mode():
        for scale in (1, 2):  # the second call knows what the first has shown
            recorder.sites.model(scale * X)
    stats = recorder.stats()
    return values(stats), stats.manifest["absent"]


@pytest.mark.parametrize("metrics", [["rms"], ["rms", "block_influence"], ["rms", "relative_contribution"]])
@pytest.mark.parametrize(("kind", "mode"), [(Adds, torch.inference_mode), (AddsUncounted, torch.no_grad)])
def test_what_a_block_writes_in_place_without_a_count_is_seen_by_its_values(kind, mode, metrics):
    found, absent = calls(kind, metrics, mode)
    right = calls(PreLN, ["rms"], torch.no_grad)[0]
    assert found == near(right)  # and nothing of the blocks' updates
    if metrics != ["rms"]:
        assert absent == dict.fromkeys(("block 1", "block 2"), "the block writes into its own input in place")


def test_a_block_that_writes_only_into_inference_tensors_is_not_taken_for_one_that_never_does():
    class Sometimes(PreLN):
        def add(self, h, norm, part):
            return Adds.add(self, h, norm, part) if h.is_inference() else super().add(h, norm, part)

    with record(Stack(Sometimes), ["block_influence"], masks=["all"]) as recorder:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                recorder.sites.model(1 * X)
    with record(Stack(PreLN), ["block_influence"], masks=["all"]) as right, torch.no_grad():
        right.sites.model(X)
    assert values(recorder.stats()) == near(values(right.stats()))
