"""Scales of integer grids, against a plain search."""

import numpy as np
import pytest

from headrace.low_precision import grid
from tests.quantize.matrices import random_matrix


def test_scales_are_the_best_of_the_shares_that_are_tried():
    w = random_matrix(outputs=5)[0]
    scales = np.asarray(grid.search_scales(w, 4, 32))
    for group in range(2):
        inputs = np.asarray(w)[32 * group : 32 * (group + 1)]
        for output in range(5):
            weights = inputs[:, output]
            tried = np.float16(np.abs(weights).max() / 7 * np.arange(1, 101) / 100).astype(np.float32)
            errors = [np.sum(np.abs(weights - s * np.clip(np.round(weights / s), -8, 7)) ** 4) for s in tried]
            assert scales[group, output] == pytest.approx(tried[int(np.argmin(errors))], rel=0.03)
