"""The Triton kernel of gather and scatter: one for both directions, all token orders, page sizes and dtypes.

A *row* is contiguous on both sides: all moved heads of a token if they lie together in the pool (NHD), otherwise one head. It is
divided into *pieces* of equal length (`piece_words`). Wire pieces follow each other. A piece of the pool is found by strides, so
NHD, HND and views of an engine's own tensors are one case. A tile is some consecutive pieces of one buffer. Words are as wide as
every address and stride allows: 8 bytes, and 16-byte accesses if pieces begin on multiples of that.

Pieces are numbered from the first slot of the first page on. So a tile is part of one page if pages are multiples of tiles: its
page is then looked up once, and the offsets of its words are the same for every tile.

A program moves one tile: programs with several were slower on an H200, with and without digest. If the number of programs is
limited, each takes every n-th tile, so programs that run at the same time store next to each other. With a digest, the words are
mixed while they are in registers, and a program adds its sum once. If elements are converted, those of the wire are put together
to words first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transfer.copy.elements import narrowed, widened
from transfer.copy.words import add_to, keys_of, mixed, offsets_of, words_of

WORD_TYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
MAX_PIECES = 2**31 - 2**20  # of a buffer in one launch: with the last tile they are still numbered by 32 bits


# Nothing is specialised for values that change from plan to plan: that would compile variants in mid-service.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["pages", "wire", "digest", "table", "factors", "num_pages", "first_piece", "end_piece", "num_buffers"]
)
def copy_pieces(  # type: ignore[no-untyped-def]  # Triton gives the parameters their types
    pages: tl.int64,
    wire: tl.int64,
    digest: tl.int64,
    table: tl.int64,
    factors: tl.int64,
    num_pages: tl.int64,
    first_piece: tl.int32,
    end_piece: tl.int32,
    num_buffers,
    ROW: tl.constexpr,
    HEADS: tl.constexpr,
    PIECE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    OFFSET_TYPE: tl.constexpr,
    POOL_TYPE: tl.constexpr,
    WIRE_TYPE: tl.constexpr,
    POOL_ALIGN: tl.constexpr,
    WIRE_ALIGN: tl.constexpr,
    WIRE_BYTES: tl.constexpr,
    IS_CONVERSION: tl.constexpr,
    IS_SCALED: tl.constexpr,
    IS_NATIVE: tl.constexpr,
    SOURCE_KIND: tl.constexpr,
    TARGET_KIND: tl.constexpr,
    IS_GATHER: tl.constexpr,
    HAS_DIGEST: tl.constexpr,
    TILE_PIECES: tl.constexpr,
):
    """Move the pieces [first_piece, end_piece) of every buffer.

    If ``num_buffers`` is None, which makes it a constant, each program moves one tile: grid (tiles, buffers). Otherwise it is the
    int32 number of buffers, and programs move any number of tiles: grid (programs,).

    All pointers are addresses. ``table`` has for each buffer the address of its first pool row and the offset of its wire in
    bytes. Lengths and strides are in elements of POOL_TYPE and WIRE_TYPE, which are equally many. Pieces begin on multiples of an
    align, in such elements: above 1 it means 16 bytes. Pieces whose page is outside the pool are skipped.
    """
    PIECES_PER_ROW: tl.constexpr = (ROW + PIECE - 1) // PIECE
    PIECES_PER_TOKEN: tl.constexpr = HEADS * PIECES_PER_ROW
    PIECES_PER_PAGE: tl.constexpr = PAGE_SIZE * PIECES_PER_TOKEN
    IS_IN_ONE_PAGE: tl.constexpr = PIECES_PER_PAGE % TILE_PIECES == 0
    TILES_PER_PAGE: tl.constexpr = PIECES_PER_PAGE // TILE_PIECES
    IS_EXACT: tl.constexpr = ROW % PIECE == 0
    # Pieces and rows are whole words: `can_digest`, and `piece_words` gives a power of two.
    WORD_ELEMENTS: tl.constexpr = 8 // WIRE_BYTES
    tile, buffer = tl.program_id(0), tl.program_id(1)
    first_tile = first_piece // TILE_PIECES
    tile += first_tile
    in_tile = tl.arange(0, TILE_PIECES)
    column = tl.arange(0, PIECE)
    if HAS_DIGEST:
        counts = tl.zeros([TILE_PIECES, PIECE // WORD_ELEMENTS], tl.uint64)
    begin, end, step = 0, 1, 1  # the compiler removes this loop
    if num_buffers is not None:
        num_tiles = tl.cdiv(end_piece, TILE_PIECES) - first_tile
        begin, end, step = tl.program_id(0), num_tiles * num_buffers, tl.num_programs(0)
    for index in range(begin, end, step):
        if num_buffers is not None:
            tile, buffer = first_tile + index % num_tiles, index // num_tiles
        piece = tile * TILE_PIECES + in_tile
        is_moved = (piece >= first_piece) & (piece < end_piece)

        page_table = pages.to(tl.pointer_type(tl.int64))
        if IS_IN_ONE_PAGE:
            is_used = tile * TILE_PIECES < end_piece
            page = tl.load(page_table + tile // TILES_PER_PAGE, mask=is_used, other=-1)
            in_page = (tile % TILES_PER_PAGE) * TILE_PIECES + in_tile
        else:
            page = tl.load(page_table + piece // PIECES_PER_PAGE, mask=is_moved, other=-1)
            in_page = piece % PIECES_PER_PAGE
        entry = table.to(tl.pointer_type(tl.int64)) + 2 * buffer
        pool_address = tl.load(entry)
        pool_base = tl.multiple_of(pool_address.to(tl.pointer_type(POOL_TYPE)), 16 if POOL_ALIGN > 1 else 1)
        # Division and product state the alignment of the offset. The compiler loses a hint on a sum when it simplifies the sum.
        first_wire = (tl.load(entry + 1) // (WIRE_BYTES * WIRE_ALIGN)) * WIRE_ALIGN
        wire_base = tl.multiple_of(wire.to(tl.pointer_type(WIRE_TYPE)), 16 if WIRE_ALIGN > 1 else 1)

        is_moved = is_moved & (page >= 0) & (page < num_pages)
        token = (in_page // PIECES_PER_TOKEN).to(OFFSET_TYPE)
        head = ((in_page // PIECES_PER_ROW) % HEADS).to(OFFSET_TYPE)
        of_row = in_page % PIECES_PER_ROW
        offset = token * TOKEN_STRIDE + head * HEAD_STRIDE + of_row * PIECE
        if IS_IN_ONE_PAGE:
            at_pool = (pool_base + page * PAGE_STRIDE) + (offset[:, None] + column[None, :])
        else:
            at_pool = pool_base + (page * PAGE_STRIDE + offset)[:, None] + column[None, :]
        # A number per program and a small one per word: what each thread has to keep is less.
        if IS_EXACT:
            tile_wire = first_wire + (tile * TILE_PIECES - first_piece).to(tl.int64) * PIECE
            piece_wire = in_tile * PIECE
        else:
            tile_wire = first_wire
            piece_wire = ((piece - first_piece) // PIECES_PER_ROW).to(tl.int64) * ROW + of_row * PIECE
        at_wire = (wire_base + tile_wire) + (piece_wire[:, None] + column[None, :])
        mask = is_moved[:, None]
        if not IS_EXACT:
            mask = mask & ((of_row * PIECE)[:, None] + column[None, :] < ROW)

        at_source = at_pool if IS_GATHER else at_wire
        values = tl.load(at_source, mask=mask)
        stored = values
        if IS_CONVERSION:
            numbers = widened(values, SOURCE_KIND, IS_NATIVE)
            if IS_SCALED:
                numbers = numbers * tl.load(factors.to(tl.pointer_type(tl.float32)) + buffer)
            stored = narrowed(numbers, TARGET_KIND, IS_NATIVE)
        at_target = at_wire if IS_GATHER else at_pool
        tl.store(at_target, stored, mask=mask)
        if HAS_DIGEST:
            words = words_of(stored if IS_GATHER else values, TILE_PIECES, PIECE, WORD_ELEMENTS)
            word = tl.arange(0, PIECE // WORD_ELEMENTS)
            keys = keys_of(tile_wire // WORD_ELEMENTS) + offsets_of((piece_wire // WORD_ELEMENTS)[:, None] + word[None, :])
            is_word = is_moved[:, None]
            if not IS_EXACT:
                is_word = is_word & ((of_row * PIECE)[:, None] + (word * WORD_ELEMENTS)[None, :] < ROW)
            counts += tl.where(is_word, mixed(words, keys), 0)
    if HAS_DIGEST:
        add_to(digest, counts)


def piece_words(row: int, most: int) -> int:
    """Return the words of a row in a piece: a power of two that divides the row, if that is a line of the cache.

    Otherwise the size that leaves at most an eighth of the lanes without work, or 16 words; never more than `most`.
    """
    exact = row & -row
    if exact >= min(16, row):
        return min(most, exact)
    columns: int = min(most, triton.next_power_of_2(row))
    while columns > 16 and triton.cdiv(row, columns) * columns * 8 > row * 9:
        columns //= 2
    return columns
