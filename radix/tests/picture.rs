//! The picture of a tree: its sums, its bound, and whose it is.

#[path = "shared/host.rs"]
mod host;

use host::{DEVICE, Host};
use proptest::prelude::*;
use rootstock_radix::{
    Action, ContextKind, Hints, NamespaceKey, NodeRef, Outcome, Part, Picture, PictureLimits,
    SpanMeta, Target, TenantId, Token, Ttl,
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

/// What is left below a shown part says what the nodes in it say one by one.
fn check_rests(all: &Picture, some: &Picture) {
    let shown = |id: NodeRef| some.parts.iter().position(|part| part.id == Some(id));
    // By place in `some`: the nearest part that is shown, on the way up.
    let above = |part: &Part| {
        let up = |at: &u32| all.parts[*at as usize].parent;
        let mut way = std::iter::successors(part.parent, up);
        way.find_map(|at| all.parts[at as usize].id.and_then(shown))
    };
    for rest in some.parts.iter().filter(|part| part.id.is_none()) {
        let up = rest.parent.map(|up| up as usize);
        let hidden = |part: &&Part| part.id.and_then(shown).is_none() && above(part) == up;
        let hidden: Vec<&Part> = all.parts.iter().filter(hidden).collect();
        assert_eq!(rest.nodes as usize, hidden.len());
        let sum = |of: fn(&Part) -> u32| hidden.iter().map(|part| of(part)).sum::<u32>();
        assert_eq!(rest.pages, sum(|part| part.pages));
        assert_eq!(rest.tiers.device, sum(|part| part.tiers.device));
        assert_eq!(rest.tiers.host, sum(|part| part.tiers.host));
        assert_eq!(rest.pinned, sum(|part| part.pinned));
        let most = |of: fn(&Part) -> u32| hidden.iter().map(|part| of(part)).max();
        assert_eq!(Some(rest.hits), most(|part| part.hits));
        let highest = hidden.iter().map(|part| part.priority).max();
        assert_eq!(Some(rest.priority), highest);
        let last = hidden.iter().filter_map(|part| part.pin_left_s).max();
        assert_eq!(rest.pin_left_s, last);
        assert_eq!(rest.used, hidden.iter().any(|part| part.used));
    }
}

proptest! {
    #[test]
    fn what_is_summed_up_says_what_its_nodes_say_and_programs_are_where_they_end(
        prompts in proptest::collection::vec(
            (proptest::collection::vec(0_u32..2, 1..12), -3_i32..4, 0_u8..4), 1..24),
        nodes in 1_usize..8,
    ) {
        let mut host = Host::of(1, 400);
        let mut leases = Vec::new();
        let mut programs = Vec::new();
        for (n, (prompt, priority, what)) in prompts.iter().enumerate() {
            let mut lease = host.run(prompt, *priority);
            if *what == 3 {
                let hints = Hints { program: Some(n.to_string()), ..Hints::default() };
                host.cache.describe(TENANT, &mut lease, &hints);
                programs.push(prompt);
            }
            match what {
                1 => leases.push(lease),
                _ => host.end(lease),
            }
            if *what == 2 {
                let ttl = Ttl { seconds: 100 + n as u64, clamped: false };
                let target = Target::Prefix { ns: host.ns, tokens: prompt.clone() };
                let _ = host.cache.act(TENANT, &Action::Pin { target, ttl }, host.now);
            }
        }
        let all = picture(&host, None, usize::MAX);
        let some = picture(&host, None, nodes);
        check_rests(&all, &some);
        check_rests(&all, &all);
        for (place, prompt) in some.programs.iter().zip(programs.iter().rev()) {
            prop_assert_eq!(place.pages as usize, prompt.len());
            let holds = |part: &Part| {
                let tokens = part.id.and_then(|id| host.cache.tokens_of_node(host.ns, id));
                tokens.filter(|tokens| prompt.starts_with(tokens)).map(|tokens| tokens.len())
            };
            let deepest = (0..some.parts.len()).max_by_key(|&at| holds(&some.parts[at]));
            let deepest = deepest.filter(|&at| holds(&some.parts[at]).is_some());
            prop_assert_eq!(place.part.map(|at| at as usize), deepest);
        }
        leases.into_iter().for_each(|lease| host.end(lease));
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

/// What several nodes are together is what most of their pages are.
#[test]
fn a_rest_is_of_the_kind_of_most_of_its_pages() {
    use ContextKind::{History, System, ToolOutput};
    for (branches, most) in [
        (
            [(System, 3), (History, 2), (ToolOutput, 2), (History, 2)],
            History,
        ),
        (
            [(System, 5), (History, 2), (ToolOutput, 2), (History, 2)],
            System,
        ),
        (
            [(System, 1), (ToolOutput, 4), (History, 3), (System, 2)],
            ToolOutput,
        ),
    ] {
        let mut host = Host::of(1, 400);
        for (branch, (kind, pages)) in (1..).zip(branches) {
            let tokens: Vec<Token> = vec![branch; pages];
            let mut lease = host.find(&tokens).lease;
            let n = u32::try_from(pages).unwrap();
            let (mut room, _) = host.cache.reserve(DEVICE, n, host.now).unwrap();
            let own = host.cache.acquire(&mut room, n);
            host.cache.cancel(room);
            let meta = SpanMeta {
                kind,
                ..SpanMeta::default()
            };
            let _ = host.cache.extend(&mut lease, &tokens, own, &meta, host.now);
            host.end(lease);
        }
        // One part that is larger than all of them.
        host.insert(&[99; 20], 0);
        let parts = picture(&host, None, 1).parts;
        assert_eq!((parts[0].pages, parts[1].nodes), (20, 4));
        assert_eq!(parts[1].kind, most);
    }
}
