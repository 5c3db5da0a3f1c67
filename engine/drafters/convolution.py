"""DFlash 2's grouped dynamic convolution over the rows of one block."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from dspark_tui.engine.drafters.config import BackboneConfig


class GroupedConv(nn.Module):
    """Stands before and after a sublayer.

    Coefficients are `base_kernel` `[side, tap, hidden]` plus `kernel_projection(n)`, one per row, side, tap
    and group of channels. Row 0 has no predecessor; nothing crosses rounds.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.conv_taps, self.group = config.conv_taps, config.conv_group
        self.groups = config.hidden_size // config.conv_group
        self.base_kernel = mx.zeros((2, config.conv_taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * config.conv_taps * self.groups, bias=False)

    def coefficients(self, normed: mx.array) -> mx.array:
        """Of every side, tap, row and channel: `[rows, hidden]` to `[side, tap, rows, hidden]`."""
        rows = normed.shape[0]
        delta = self.kernel_projection(normed).reshape(rows, 2, self.conv_taps, self.groups, 1)
        base = self.base_kernel.reshape(1, 2, self.conv_taps, self.groups, self.group)
        return (base + delta).reshape(rows, 2, self.conv_taps, -1).transpose(1, 2, 0, 3)

    def convolve(self, x: mx.array, taps: mx.array) -> mx.array:
        """`out[i] = sum over t of taps[t, i] * x[i - t]`; `taps` `[tap, rows, hidden]` of one side."""
        out = taps[0] * x
        for t in range(1, min(self.conv_taps, x.shape[0])):
            out = out + taps[t] * mx.pad(x[:-t], [(t, 0), (0, 0)])
        return out
