"""The pool of blocks: what an engine that counts references does with it."""

import hashlib

import pytest

from rootstock import Blocks, Hints


def names(*contents: int) -> list[bytes]:
    chain, out = b"", []
    for content in contents:
        chain = hashlib.sha256(chain + bytes([content])).digest()
        out.append(chain)
    return out


def admit(pool: Blocks, hashes: list[bytes], hints: Hints | None = None) -> list:
    blocks = pool.find(hashes, len(hashes))
    cached = len(blocks)
    pool.touch(blocks)
    more, _ = pool.allocate(len(hashes) - cached)
    blocks = blocks + more
    pool.cache(blocks, cached, len(blocks), hashes, hints)
    return blocks


def test_blocks_are_shared_counted_and_evicted_from_the_end():
    pool = Blocks(9, policy="lru")
    first = admit(pool, names(1, 2, 3))
    assert [block.block_id for block in first] == [1, 2, 3]
    assert [block.ref_cnt for block in first] == [1, 1, 1]
    second = admit(pool, names(1, 2, 4))
    assert [block.block_id for block in second] == [1, 2, 4]
    assert [block.ref_cnt for block in second] == [2, 2, 1]
    assert first[0].block_hash == names(1)[0] + bytes(4)
    assert [block.block_hash_num_tokens for block in second] == [16, 32, 48]
    pool.free(reversed(first))
    pool.free(reversed(second))
    assert pool.available() == 8
    blocks, gone = pool.allocate(5)
    assert [block.block_id for block in blocks] == [5, 6, 7, 8, 3]
    assert gone == [names(1, 2, 3)[2]]
    assert blocks[4].block_hash is None
    pool.check()


def test_what_is_wrong_is_refused_with_its_numbers():
    pool, other = Blocks(4, policy="lru"), Blocks(4, policy="lru")
    with pytest.raises(ValueError, match="Cannot get 9 free blocks"):
        pool.allocate(9)
    with pytest.raises(TypeError, match="another pool"):
        pool.touch(other.blocks())
    with pytest.raises(ValueError, match="a hash has 33 bytes"):
        pool.find([bytes(33)], 1)
    blocks = admit(pool, names(1))
    pool.free(blocks)
    with pytest.raises(ValueError, match="page 1 is not in use"):
        pool.free(blocks)
    with pytest.raises(ValueError, match="policy is"):
        Blocks(4, policy="none")
    pool.check()


def test_short_hashes_keep_their_length():
    pool = Blocks(4, policy="lru")
    blocks = admit(pool, [bytes(range(16))])
    assert blocks[0].block_hash == bytes(range(16)) + bytes(4)
    assert pool.block_of(bytes(range(16))) is blocks[0]


def test_a_pin_is_not_counted_and_a_finished_program_goes_first():
    pool = Blocks(17, policy="lru", pin_budget=0.5)
    text = '{"cache_control": {"type": "ephemeral", "ttl": "1m"}}'
    pinned = admit(pool, names(1, 1, 1), Hints(text, prompt_tokens=48))
    pool.free(reversed(pinned))
    assert pool.available() == 13 and pool.stats()["pinned_blocks"] == 3
    text = '{"agent_context": {"trajectory_id": "p", "trajectory_final": true}}'
    kept = admit(pool, names(2, 2))
    pool.free(reversed(kept))
    done = admit(pool, names(3, 3), Hints(text, prompt_tokens=32))
    pool.free(reversed(done))
    pool.allocate(11)
    assert pool.find_length(names(1, 1, 1), 3) == 3
    assert pool.find_length(names(2, 2), 2) == 2
    assert pool.find_length(names(3, 3), 2) == 0


def test_reset_waits_for_what_is_in_use():
    pool = Blocks(4, policy="lru")
    blocks = admit(pool, names(1))
    assert pool.reset() is False
    pool.free(blocks)
    assert pool.reset() is True
    assert pool.find(names(1), 1) == []
