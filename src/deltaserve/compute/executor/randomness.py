"""Counter-based random numbers: a pure function of (seed, output position), the same on every device and worker."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def stream_of(seed: int) -> int:
    """Where the numbers of a seed begin, unsigned 64 bit. Mixed, so neighbouring seeds give unrelated streams."""
    return _mix((seed + _GOLDEN) & _MASK)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2^-32."""
    return (_mix((stream_of(seed) + (position + 1) * _GOLDEN) & _MASK) >> 32) * 2.0**-32
