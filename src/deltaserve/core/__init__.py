"""Pure: what every package speaks: ids, errors, tokens, sampling, metrics, layouts, frames, the transport seam."""
