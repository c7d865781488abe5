//! Arenas from outside: what layouts say of themselves, views, and sizes beyond 32 bits.

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

#[test]
fn a_layout_says_the_numbers_that_it_was_made_of() {
    let spec = LayoutSpec {
        order: LayoutOrder::LayerFirst,
        page_tokens: 3,
        layers: 5,
        kv_heads: 7,
        head_dim: 11,
        dtype: KvDtype::Bf16,
    };
    let layout = KvLayout::new(spec).unwrap();
    let said = LayoutSpec {
        order: layout.order(),
        page_tokens: layout.page_tokens(),
        layers: layout.layers(),
        kv_heads: layout.kv_heads(),
        head_dim: layout.head_dim(),
        dtype: layout.dtype(),
    };
    assert_eq!(said, spec);
    assert_eq!(layout.spec(), spec);
}

#[test]
fn views_show_the_bytes_of_the_arena_and_nothing_else() {
    let arena = |dtype| {
        let layout = KvLayout::new(LayoutSpec {
            order: LayoutOrder::PageFirst,
            page_tokens: 2,
            layers: 1,
            kv_heads: 1,
            head_dim: 2,
            dtype,
        });
        KvArena::new(layout.unwrap(), 2).unwrap()
    };
    let mut wide = arena(KvDtype::F32);
    wide.page_mut(PageId::new(1)).fill(0x3f);
    let seen = wide.as_f32().unwrap();
    assert_eq!(seen.len(), 3 * wide.layout().page_elements());
    let ours = wide.layout().page_elements()..2 * wide.layout().page_elements();
    for (at, value) in seen.iter().enumerate() {
        let bits = if ours.contains(&at) { 0x3f3f_3f3f } else { 0 };
        assert_eq!(value.to_bits(), bits);
    }
    wide.as_f32_mut().unwrap()[0] = 1.0;
    assert_eq!(wide.bytes()[..4], 1.0_f32.to_le_bytes());
    for dtype in [KvDtype::F16, KvDtype::Bf16] {
        let mut narrow = arena(dtype);
        narrow.as_u16_mut().unwrap()[9] = 0x1234;
        assert_eq!(narrow.bytes()[18..20], 0x1234_u16.to_le_bytes());
        let seen = narrow.as_u16().unwrap();
        assert_eq!(seen.len(), 3 * narrow.layout().page_elements());
        let f16 = narrow.as_f16().map(|all| all[9].to_bits());
        let bf16 = narrow.as_bf16().map(|all| all[9].to_bits());
        let expected = match dtype {
            KvDtype::F16 => (Some(0x1234), None),
            KvDtype::Bf16 | KvDtype::F32 => (None, Some(0x1234)),
        };
        assert_eq!((f16, bf16), expected);
    }
}
