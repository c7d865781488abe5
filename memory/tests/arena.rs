//! An arena larger than 32 bits address.
#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a test")]

use rootstock_memory::{KvArena, KvDtype, KvLayout, LayoutOrder, LayoutSpec, PageId};

/// Faults I1: offsets do not wrap at 32 bits. Bytes that nobody touches take no memory.
#[test]
fn each_page_of_an_arena_beyond_4_gib_has_bytes_of_its_own() {
    let layout = KvLayout::new(LayoutSpec {
        order: LayoutOrder::PageFirst,
        page_tokens: 256,
        layers: 2,
        kv_heads: 1,
        head_dim: 1 << 16,
        dtype: KvDtype::F32,
    })
    .unwrap();
    let bytes = layout.page_bytes();
    assert_eq!(bytes, 1 << 28);
    let total = 20;
    let Ok(mut arena) = KvArena::new(layout, total) else {
        println!("skipped: no address space of 5 GiB");
        return;
    };
    for page in 0..=total {
        let mark = (page + 1).to_le_bytes();
        let own = arena.page_mut(PageId::new(page));
        own[..4].copy_from_slice(&mark);
        own[bytes - 4..].copy_from_slice(&mark);
    }
    for page in 0..=total {
        let mark = (page + 1).to_le_bytes();
        let own = arena.page(PageId::new(page));
        assert_eq!(own[..4], mark, "page {page}");
        assert_eq!(own[bytes - 4..], mark, "page {page}");
        let first = page as usize * bytes;
        assert_eq!(arena.bytes()[first..first + 4], mark, "page {page}");
    }
}
