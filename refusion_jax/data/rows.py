"""A packed row as bytes: the real tokens, and where its documents and their prompts end.

A record, little endian:

    uint32          CRC-32 of all that follows, for other readers: ArrayRecord compares its own checksum
    uint32          number of documents D
    uint32 x D      tokens of each document, one after the other from the start of the row
    uint32 x D      how many of them are its prompt
    uint16|uint32   the tokens; the rest of the row is padding

Segment ids and positions follow from the lengths, so they take no room.

Axes: D documents of a row, T row length.
"""

import zlib

import numpy as np


def token_type(vocabulary: int) -> np.dtype:
    """The dtype of stored tokens: two bytes if that is enough for every id, else four."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


def encode_row(tokens: np.ndarray, lengths: list[int], prompt_lengths: list[int]) -> bytes:
    """The record of a row: tokens [at most T] of `token_type`, lengths [D] of documents, and [D] of their prompts."""
    body = np.array([len(lengths), *lengths, *prompt_lengths], "<u4").tobytes() + tokens.tobytes()
    return zlib.crc32(body).to_bytes(4, "little") + body


def decode_row(record: bytes, row_length: int, dtype: np.dtype) -> dict[str, np.ndarray]:
    """tokens [T] int32, segment_ids [T] int32 (1, 2, ...; 0 is padding), is_response [T] bool.

    Of lengths 3 and 2, of which 1 and 0 are prompts, in a row of 6:

        tokens         5 6 7 8 9 0
        segment_ids    1 1 1 2 2 0
        is_response    0 1 1 1 1 0
    """
    documents = int.from_bytes(record[4:8], "little")
    lengths, prompts = np.frombuffer(record, "<u4", 2 * documents, 8).reshape(2, documents).astype(np.int64)
    real = np.frombuffer(record, dtype, offset=8 + 8 * documents)
    tokens, segment_ids = np.zeros(row_length, np.int32), np.zeros(row_length, np.int32)
    is_response = np.zeros(row_length, bool)
    tokens[: len(real)] = real
    segment_ids[: len(real)] = np.repeat(np.arange(1, documents + 1), lengths)
    parts = np.stack([prompts, lengths - prompts], axis=1).ravel()
    is_response[: len(real)] = np.repeat(np.tile([False, True], documents), parts)
    return {"tokens": tokens, "segment_ids": segment_ids, "is_response": is_response}
