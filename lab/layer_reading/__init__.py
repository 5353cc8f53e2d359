"""What a decoder layer hands on, read from its source and from the source of the model that calls it.

What the values mean that a layer's ``forward`` returns is not said by the layer: it is said by whoever
reads them. So this module follows a model's ``forward`` symbolically, through two turns of its loop over
the layers and behind it, and looks at what the norms read: the next layer's first norm, and the model's
final norm. Both see the residual stream, whatever the layer calls it::

    hidden_states, residual = layer(positions, hidden_states, residual)      # 1st, 2nd
    hidden_states, residual = self.input_layernorm(hidden_states, residual)  # next layer: 1st + 2nd
    hidden_states, _ = fused_allreduce_rms_norm(h, residual, self.norm)      # the end: reduce(1st) + 2nd

Methods, base classes and helper functions are followed; branches that lead to different readings become
cases of their own, with their conditions. Where the two norms do not agree, or nothing proves a reading,
the case is ``unknown`` and says why. Nothing is imported or run: a source tree serves as well as the
modules of a live process (``source_of``).
"""

from __future__ import annotations

from lab.layer_reading.model import Case, Handed, Kind, Place
from lab.layer_reading.reading import read_layer
from lab.layer_reading.sources import SourceOf, Sources

__all__ = ["Case", "Handed", "Kind", "Place", "SourceOf", "Sources", "read_layer"]
