"""Heavy hitters: pages that were attended so far (H2O, Zhang et al., 2023, arXiv:2306.14048, with pages for tokens).

Pages are scored by their mean keys, and ranked by what they had of the softmax over all steps: see
``hsa_compile.ops.select_accumulated``.
"""

from dataclasses import replace

from .mean import MEAN

HEAVY_HITTERS = replace(
    MEAN,
    name="heavy_hitters",
    accumulates=True,
    source="H2O (Zhang et al., 2023, arXiv:2306.14048)",
)
