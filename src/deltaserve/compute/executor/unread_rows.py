"""Rows that draw in steps which are launched and not recorded: whatever their draws need of the device stands there."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from deltaserve.compute.executor.inputs import is_unread
from deltaserve.compute.executor.launched import DrawingItem
from deltaserve.compute.executor.resident_adjustments import AdjustedRow, CountsOfLine
from deltaserve.compute.executor.resident_rows import ResidentRows
from deltaserve.compute.executor.sampler import SampleRow
from deltaserve.compute.executor.unread_draws import draw_unread
from deltaserve.compute.layers.decoder import Decoder
from deltaserve.compute.memory.host_arrays import on_device
from deltaserve.core.ids import RowId


class UnreadRows:
    """Draws for such rows. For one thread."""

    def __init__(self, decoder: Decoder, rows: ResidentRows, device: torch.device) -> None:
        self._decoder = decoder
        self._rows = rows
        self._device = device

    def draw(self, drawing: Sequence[DrawingItem], hidden: Tensor) -> Tensor:
        """hidden [D, hidden], behind which each is to draw -> [2, D]: tokens, and 1 where the logits are finite. Rows
        are those of `draw_unread`."""
        logits = self._decoder.logits(hidden)
        counts = self._counts(drawing)
        rows = [
            SampleRow(one.row.sampling, one.position - one.row.prompt_len, counts.get(one.item.row)) for one in drawing
        ]
        draws = draw_unread(logits, rows)
        places = on_device(np.array([item.row for item, _ in drawing], np.int64), self._device)
        self._rows.last_drawn.index_copy_(0, places, draws.tokens)
        return torch.stack((draws.tokens, draws.is_finite.to(torch.int64)))

    def _counts(self, drawing: Sequence[DrawingItem]) -> dict[RowId, CountsOfLine]:
        """How often rows with penalties had each token before the one that they draw. The device counts those that it
        drew last itself."""
        known, unread, adjustments = [], [], self._rows.adjustments
        for item, row in drawing:
            if not row.sampling.needs_history:
                continue
            if is_unread(item, row):
                unread.append(AdjustedRow(item.row, row, item.q_start))
            else:
                known.append(AdjustedRow(item.row, row, item.q_start + item.q_len))
        rows = [*known, *unread]
        adjustments.bring_up(rows)
        adjustments.count(unread, self._rows.last_drawn)
        return {one.line: adjustments.of_line(one.line, one.row) for one in rows}
