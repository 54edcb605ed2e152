"""The report: what the GPU tells the host about one chunk, as unsigned 64-bit words in one small copy.

    word 0            end of the body so far
    word 1            length of the body; 0 if the chunk is to be stored as it is
    word 2            blocks that nvCOMP refused to encode
    word 3            blocks that nvCOMP failed to decode
    word 4 …          per digest: the tail (256 bytes, used where the last piece has at most 240), then a hash a piece
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from .digest import PIECE_BYTES, combine

BODY_BYTES_WORD = 1
REFUSED_WORD = 2
FAILED_WORD = 3
STATE_WORDS = 4
TAIL_WORDS = 32
WORD_BYTES = 8

_SHORT_BYTES = 240
# XXH3 hashes this much and less in another way, which the GPU leaves to the host.


def report_words(max_bytes: int, *, num_digests: int) -> int:
    """Return the words of a report with `num_digests` digests of up to `max_bytes` each."""
    return STATE_WORDS + num_digests * digest_words(max_bytes)


def digest_words(max_bytes: int) -> int:
    """Return the words that the digest of up to `max_bytes` takes in a report."""
    return TAIL_WORDS + -(-max_bytes // PIECE_BYTES)


def read_digest(words: NDArray[np.uint64], num_bytes: int) -> int:
    """Finish a digest on the host.

    Args:
        words: uint64[digest_words(num_bytes) or more], that digest's part of a report.
        num_bytes: How many bytes were hashed.
    """
    num_pieces = -(-num_bytes // PIECE_BYTES)
    pieces = words[TAIL_WORDS : TAIL_WORDS + num_pieces].copy()
    rest = num_bytes % PIECE_BYTES
    if 0 < rest <= _SHORT_BYTES:
        pieces[-1] = xxhash.xxh3_64_intdigest(words[:TAIL_WORDS].tobytes()[:rest])
    return combine(pieces)
