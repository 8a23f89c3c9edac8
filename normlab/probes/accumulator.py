"""`Accumulator`: merges what finished calls measured into running statistics, kept on the layers' devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from normlab.probes.arrays import MERGE
from normlab.probes.calls import Call, Place
from normlab.probes.metrics import SITES
from normlab.probes.readings import NormRead
from normlab.probes.reducers import RunningMoments
from normlab.probes.stats import Key, Moments


class Accumulator:
    """Running statistics by kind and device. Its size depends on the number of sites, not of batches."""

    def __init__(self, masks: Sequence[str], statistics: Mapping[str, Sequence[str]]):
        self.masks = tuple(masks)
        self.statistics = statistics
        self.kinds: set[str] = set()
        self._moments: dict[tuple[str, torch.device], RunningMoments] = {}
        self._rows: dict[tuple[str, torch.device], dict[Place, int]] = defaultdict(dict)
        self._widths: dict[tuple[str, Place], int] = {}
        self._arrays: dict[tuple[str, Place, int], Tensor] = {}

    def add(self, call: Call, values: Iterable[tuple[str, Any, Tensor, int, tuple[int, ...]]]) -> None:
        """Merge (kind, place, per-token values, width, shape of the tokens) items of one call. Places that blocks of
        another length share are merged apart; what was read by a norm that has no site is left out."""
        groups: dict[tuple[str, torch.device, tuple[int, ...]], dict[Place, Tensor]] = defaultdict(dict)
        for kind, where, numbers, width, tokens in values:
            place = where.place if isinstance(where, NormRead) else where
            if place is None or place[0] not in SITES:
                continue
            if self._widths.setdefault((kind, place), width) != width:
                call.absent[f"{place[0]} {place[1]}"] = "its width differs between calls"
                continue
            group = groups[kind, numbers.device, tokens]
            if place in group:  # differentiated twice
                self._merge(call, kind, group, tokens)
                group.clear()
            group[place] = numbers
        for (kind, _, tokens), group in groups.items():
            self._merge(call, kind, group, tokens)

    def _merge(self, call: Call, kind: str, group: dict[Place, Tensor], tokens: tuple[int, ...]) -> None:
        numbers = torch.stack(list(group.values()))
        masks = call.masks(numbers.device, tokens)
        if masks is None:
            return
        self.kinds.add(kind)
        key = (kind, numbers.device)
        if key not in self._moments:
            self._moments[key] = RunningMoments(len(self.masks), len(self.statistics[kind]), numbers.device)
        rows = self._rows[key]
        index = [rows.setdefault(place, len(rows)) for place in group]
        self._moments[key].reserve(len(rows))
        self._moments[key].update(index, numbers, masks)

    def add_arrays(self, arrays: Iterable[tuple[str, Any, int, Tensor]]) -> None:
        """Merge (statistic, place, mask index, array) items."""
        with torch.inference_mode(False), torch.no_grad():
            for statistic, where, mask, array in arrays:
                place = where.place if isinstance(where, NormRead) else where
                if place is None or place[0] not in SITES:
                    continue
                self.kinds.add(statistic)
                old = self._arrays.get((statistic, place, mask))
                # Cloned, because a tensor made in inference mode could not be merged outside it.
                self._arrays[statistic, place, mask] = array.clone() if old is None else MERGE[statistic](old, array)

    def results(self) -> tuple[dict[Key, Moments], dict[Key, Tensor]]:
        """Everything so far, on the CPU; one transfer a kind and device."""
        moments: dict[Key, Moments] = {}
        for (kind, device), running in self._moments.items():
            state = running.state.cpu().double()
            for (site, layer), row in self._rows[kind, device].items():
                for i, mask in enumerate(self.masks):
                    for j, statistic in enumerate(self.statistics[kind]):
                        width = self._widths[kind, (site, layer)]
                        count, mean, m2, peak = state[:, row, i, j].tolist()
                        moments[site, layer, mask, statistic] = Moments(count, mean, m2, peak, width)
        arrays = {
            (site, layer, self.masks[mask], statistic): array.cpu()
            for (statistic, (site, layer), mask), array in self._arrays.items()
        }
        return moments, arrays
