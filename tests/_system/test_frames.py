"""Frames in a byte stream."""

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_strategies_ext._system.frames import MAX_NUM_BYTES, FrameDecoder, FrameTooLongError, encode_frame


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=40)), max_size=6), st.integers(1, 30))
def test_frames_are_decoded_for_every_split_of_the_stream(
    frames: list[tuple[int, bytes]], piece_num_bytes: int
) -> None:
    stream = b"".join(encode_frame(data, kind) for kind, data in frames)
    decoder = FrameDecoder()
    pieces = [stream[start : start + piece_num_bytes] for start in range(0, len(stream), piece_num_bytes)]
    assert [frame for piece in pieces for frame in decoder.decode(piece)] == frames


def test_a_frame_that_announces_too_much_is_refused_before_its_memory_is_allocated() -> None:
    decoder = FrameDecoder()
    assert list(decoder.decode(encode_frame(b"first"))) == [(0, b"first")]
    tracemalloc.start()
    try:
        with pytest.raises(
            FrameTooLongError, match="4,294,967,295 bytes is longer than the maximum of 67,108,864 bytes"
        ):
            list(decoder.decode(struct.pack("!BI", 0, 0xFFFFFFFF)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_that_no_receiver_would_accept_is_not_sent() -> None:
    class Long(bytes):
        def __len__(self) -> int:
            return MAX_NUM_BYTES + 1

    with pytest.raises(FrameTooLongError, match="67,108,865 bytes"):
        encode_frame(Long())
