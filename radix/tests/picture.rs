//! The picture of a tree: its sums, its bound, and whose it is.

#[path = "shared/host.rs"]
mod host;

use host::Host;
use proptest::prelude::*;
use rootstock_radix::{
    Action, NamespaceKey, NodeRef, Outcome, Picture, PictureLimits, Target, TenantId, Token, Ttl,
};

const TENANT: TenantId = TenantId(1);
const SECOND: u64 = 1_000_000_000;

fn picture(host: &Host, under: Option<NodeRef>, nodes: usize) -> Picture {
    let limits = PictureLimits { nodes, programs: 8 };
    host.cache
        .picture((TENANT, host.ns), under, limits, host.now)
}

/// What must hold of every picture, however little it shows.
fn check(picture: &Picture, nodes: usize) {
    let parts = &picture.parts;
    let shown = parts.iter().filter(|part| part.id.is_some()).count();
    assert!(shown <= nodes, "{shown} of {nodes}");
    assert!(parts.len() <= 2 * shown + 1, "one rest a place");
    assert_eq!(
        parts.iter().map(|part| part.pages).sum::<u32>(),
        picture.pages
    );
    assert_eq!(
        parts.iter().map(|part| part.nodes).sum::<u32>(),
        picture.nodes
    );
    for (index, part) in parts.iter().enumerate() {
        let children = parts
            .iter()
            .filter(|child| child.parent == u32::try_from(index).ok());
        let below: u32 = children.map(|child| child.below).sum();
        assert_eq!(part.below, part.pages + below, "{index}: {part:?}");
        assert!(part.parent.is_none_or(|up| (up as usize) < index));
        assert!(part.tiers.device + part.tiers.host <= part.pages);
        let Some(up) = part.parent.and_then(|up| parts.get(up as usize)) else {
            continue;
        };
        assert_eq!(part.depth, up.depth + up.pages, "{index}: {part:?}");
    }
}

proptest! {
    #[test]
    fn pages_and_nodes_of_any_picture_add_up_to_those_of_the_tree(
        prompts in proptest::collection::vec(proptest::collection::vec(0_u32..2, 0..12), 0..24),
        nodes in 1_usize..12,
    ) {
        let mut host = Host::of(1, 400);
        for prompt in &prompts {
            host.insert(prompt, 0);
        }
        let all = picture(&host, None, usize::MAX);
        let stats = host.cache.stats();
        // Each namespace has a root of its own.
        prop_assert_eq!(all.nodes, stats.nodes - stats.namespaces);
        prop_assert_eq!(all.pages, stats.tiers[0].evictable);
        prop_assert!(all.parts.iter().all(|part| part.id.is_some()) && !all.is_partial);
        check(&all, usize::MAX);
        let some = picture(&host, None, nodes);
        check(&some, nodes);
        prop_assert_eq!((some.nodes, some.pages), (all.nodes, all.pages));
        for part in &some.parts {
            let Some(id) = part.id else { continue };
            let below = picture(&host, Some(id), nodes);
            check(&below, nodes);
            prop_assert_eq!(below.pages, part.below);
            let tokens = host.cache.tokens_of_node(host.ns, id).unwrap();
            prop_assert_eq!(tokens.len(), (part.depth + part.pages) as usize);
            prop_assert_eq!(host.peek(&tokens) as usize, tokens.len());
        }
    }
}

#[test]
fn the_largest_come_one_by_one_and_equals_in_the_order_of_the_tree() {
    let mut host = Host::of(1, 400);
    let prompt = |branch: Token, len: usize| [vec![0; 4], vec![branch; len]].concat();
    for branch in 1..=20 {
        host.insert(&prompt(branch, branch as usize), 0);
    }
    let shown = picture(&host, None, 4);
    let pages: Vec<u32> = shown.parts.iter().map(|part| part.pages).collect();
    assert_eq!(pages, [4, 20, 19, 18, (1..=17).sum()]);
    assert_eq!(shown.parts[4].nodes, 17);
    assert_eq!((shown.parts[4].id, shown.parts[4].parent), (None, Some(0)));
    assert_eq!(picture(&host, None, 4), shown, "the same again");
}

#[test]
fn pins_show_their_time_and_a_node_that_went_is_found_no_more() {
    let mut host = Host::of(1, 400);
    host.insert(&[1, 2, 3, 4], 7);
    let ttl = Ttl {
        seconds: 300,
        clamped: false,
    };
    let target = Target::Prefix {
        ns: host.ns,
        tokens: vec![1, 2],
    };
    let pinned = host
        .cache
        .act(TENANT, &Action::Pin { target, ttl }, host.now);
    assert_eq!(pinned, Outcome::Accepted { pages: 2 });
    host.now += 100 * SECOND;
    let parts = picture(&host, None, 9).parts;
    let told = |part: &rootstock_radix::Part| (part.pages, part.pinned, part.pin_left_s);
    assert_eq!(
        parts.iter().map(told).collect::<Vec<_>>(),
        [(2, 2, Some(200)), (2, 0, None)]
    );
    assert_eq!(parts[1].priority, 7);
    let id = parts[1].id.unwrap();
    assert_eq!(id.to_string().parse(), Ok(id));
    assert!("5".parse::<NodeRef>().is_err() && "5.0".parse::<NodeRef>().is_err());
    let other = NamespaceKey {
        salt: Some("other".into()),
        ..NamespaceKey::default()
    };
    let other = host.cache.namespace(&other).unwrap();
    assert!(host.cache.tokens_of_node(host.ns, id).is_some());
    assert!(host.cache.tokens_of_node(other, id).is_none(), "not theirs");
    let limits = PictureLimits {
        nodes: 9,
        programs: 9,
    };
    let theirs = host
        .cache
        .picture((TENANT, other), Some(id), limits, host.now);
    assert_eq!(theirs, Picture::default());
    host.cache.flush(host.now).unwrap();
    assert!(host.cache.tokens_of_node(host.ns, id).is_none());
    assert_eq!(picture(&host, Some(id), 9), Picture::default());
}
