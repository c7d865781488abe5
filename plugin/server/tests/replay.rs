//! `replay --trace` against figures of independent models, on a small trace made for it.
#![expect(clippy::unwrap_used, reason = "tests stop at the first surprise")]

use std::path::{Path, PathBuf};

use rootstock_server::replay::{Entry, Policy, ReplayFlags, Report, TraceForm, replay, run};

/// Capacities that hold 4 to 128 blocks of 512 tokens.
const CAPACITIES: [u64; 6] = [2048, 4096, 8192, 16384, 32768, 65536];

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(name)
}

fn flags(policies: &[&str]) -> ReplayFlags {
    ReplayFlags {
        policies: policies.iter().map(|name| name.parse().unwrap()).collect(),
        capacity: CAPACITIES.to_vec(),
        ..ReplayFlags::default()
    }
}

fn small(policies: &[&str]) -> Report {
    replay(&data("replay_small.jsonl"), &flags(policies)).unwrap()
}

/// The hits of a line of the table.
fn hits(report: &Report, policy: &str) -> Vec<u64> {
    let of = |entry: &&Entry| entry.policy == policy;
    report
        .results
        .iter()
        .filter(of)
        .map(|entry| entry.hit_blocks)
        .collect()
}

#[test]
fn lru_optimum_and_infinite_are_those_of_the_plain_models() {
    let expected = std::fs::read_to_string(data("replay_small.table")).unwrap();
    assert_eq!(small(&["lru"]).table(), expected);
}

#[test]
fn every_policy_is_replayed_and_none_beats_the_optimum() {
    let report = small(&[]);
    let optimum = hits(&report, "optimum");
    let infinite = hits(&report, "infinite");
    assert_eq!(optimum.len(), CAPACITIES.len());
    for Policy { name, .. } in Policy::all() {
        let found = hits(&report, name);
        assert_eq!(found.len(), CAPACITIES.len(), "{name}");
        for ((found, best), bound) in found.iter().zip(&optimum).zip(&infinite) {
            assert!(
                found <= best && best <= bound,
                "{name}: {found} {best} {bound}"
            );
        }
    }
}

#[test]
fn lru_is_there_even_when_another_policy_is_asked_for() {
    let report = small(&["priority"]);
    let names: Vec<&str> = report
        .results
        .chunk_by(|one, next| one.policy == next.policy)
        .map(|line| line[0].policy)
        .collect();
    assert_eq!(names, ["lru", "priority", "optimum", "infinite"]);
}

#[test]
fn the_json_carries_the_same_figures_and_the_plot_one_line_each() {
    let plot = std::env::temp_dir().join(format!("rootstock-plot-{}.svg", std::process::id()));
    let flags = ReplayFlags {
        json: true,
        plot: Some(plot.clone()),
        ..flags(&["lru"])
    };
    let mut out = Vec::new();
    run(&data("replay_small.jsonl"), &flags, &mut out).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&out).unwrap();
    assert_eq!(json["form"], "mooncake");
    assert_eq!(
        (&json["requests"], &json["blocks"]),
        (&90.into(), &829.into())
    );
    let results = json["results"].as_array().unwrap();
    let at = |index: usize, field: &str| results[index][field].clone();
    assert_eq!(results.len(), 3 * CAPACITIES.len());
    assert_eq!(
        (at(0, "policy"), at(0, "capacity_blocks")),
        ("lru".into(), 4.into())
    );
    assert_eq!(at(0, "hit_blocks"), 178);
    assert_eq!(at(6, "times_lru"), 224.0 / 178.0);
    assert_eq!(at(6, "share_of_optimum"), 1.0);

    let svg = std::fs::read_to_string(&plot).unwrap();
    std::fs::remove_file(&plot).unwrap();
    assert_eq!(svg.matches("<polyline").count(), 3);
    for name in ["lru", "optimum", "infinite", "65.53k"] {
        assert!(svg.contains(&format!(">{name}</text>")), "{name}");
    }
}

#[test]
fn a_run_of_agent_tells_what_it_expects_of_seven_capacities() {
    let report = small(&["agent"]);
    let expectations = report.expectations();
    for entry in &report.results {
        let is_agent = entry.policy == "agent";
        assert_eq!(entry.expected.len(), if is_agent { 7 } else { 0 });
        let own = u64::from(entry.capacity_blocks);
        for point in &entry.expected {
            assert!(point.hit_ratio <= 1.0 && point.lru_hit_ratio <= 1.0);
            if point.capacity_blocks == own && own >= 8 {
                assert!(
                    (point.hit_ratio - entry.hit_ratio).abs() < 1e-9,
                    "{point:?}"
                );
            }
        }
        let line = format!("{} at {}:", entry.policy, entry.capacity_tokens);
        assert_eq!(expectations.contains(&line), is_agent);
    }
}

#[test]
fn a_request_trace_is_replayed_in_the_order_of_arrival() {
    // Room for three blocks: in the order of the file, which is that of the ends, the two blocks
    // of the third request would have displaced two of the first.
    let flags = ReplayFlags {
        capacity: vec![48],
        ..ReplayFlags::default()
    };
    let report = replay(&data("request_trace_small.jsonl"), &flags).unwrap();
    assert_eq!(
        (report.form, report.page_tokens),
        (TraceForm::RequestTrace, 16)
    );
    assert_eq!(
        (report.requests, report.blocks, report.distinct_blocks),
        (3, 9, 6)
    );
    assert_eq!(hits(&report, "lru"), [3]);
}

#[test]
fn a_capacity_below_one_block_is_refused_with_its_bounds() {
    let flags = ReplayFlags {
        capacity: vec![511],
        ..ReplayFlags::default()
    };
    let error = replay(&data("replay_small.jsonl"), &flags)
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("--capacity 511: must be between 512 (one block)"),
        "{error}"
    );
}

#[test]
fn a_missing_trace_is_named() {
    let error = replay(Path::new("no/such.jsonl"), &ReplayFlags::default()).unwrap_err();
    assert!(error.to_string().starts_with("no/such.jsonl: "), "{error}");
}

#[test]
fn lower_tiers_find_what_the_device_has_lost_and_are_told_apart() {
    let with = |host_capacity, storage_capacity| {
        let flags = ReplayFlags {
            capacity: vec![8192],
            host_capacity: vec![host_capacity],
            storage_capacity: vec![storage_capacity],
            ..flags(&["lru"])
        };
        replay(&data("replay_small.jsonl"), &flags).unwrap()
    };
    let (alone, host, all) = (with(0, 0), with(8192, 0), with(8192, 1 << 20));
    let [alone, host, all] = [&alone, &host, &all].map(|report| &report.results[0]);
    assert_eq!((alone.host_hit_blocks, alone.storage_hit_blocks), (0, 0));
    assert!(host.host_hit_blocks > 0 && host.storage_hit_blocks == 0);
    assert!(all.host_hit_blocks > 0 && all.storage_hit_blocks > 0);
    assert!(alone.hit_blocks < host.hit_blocks && host.hit_blocks < all.hit_blocks);
    for entry in [alone, host, all] {
        // A partial last block counts as one, so that tokens are at most blocks of 512.
        let saved = entry.saved_tokens.unwrap();
        assert!(
            saved <= entry.hit_blocks * 512 && saved > entry.hit_blocks * 400,
            "{saved}"
        );
    }
}

#[test]
fn storage_without_host_is_refused_with_what_to_do() {
    let flags = ReplayFlags {
        storage_capacity: vec![4096],
        ..flags(&["lru"])
    };
    let error = replay(&data("replay_small.jsonl"), &flags).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("--storage-capacity 4096 needs --host-capacity"),
        "{text}"
    );
}

#[test]
fn a_host_tier_is_swept_below_one_device_and_two_tiers_are_not_at_once() {
    let with = |capacity: &[u64], host_capacity: &[u64]| {
        let flags = ReplayFlags {
            capacity: capacity.to_vec(),
            host_capacity: host_capacity.to_vec(),
            ..flags(&["lru"])
        };
        replay(&data("replay_small.jsonl"), &flags)
    };
    let sizes = [0, 8192, 16384];
    let swept = with(&[8192], &[16384, 0, 8192]).unwrap();
    for (column, host) in sizes.into_iter().enumerate() {
        let alone = with(&[8192], &[host]).unwrap();
        assert_eq!(swept.results[column].host_tokens, host);
        assert_eq!(
            swept.results[column].hit_blocks,
            alone.results[0].hit_blocks
        );
        assert_eq!(swept.results[column].times_lru, Some(1.0));
    }
    let table = swept.table();
    assert!(
        table.contains("by tokens of a host tier below a device of 8192\n"),
        "{table}"
    );
    let columns: Vec<&str> = table.lines().nth(3).unwrap().split_whitespace().collect();
    assert_eq!(columns, ["0", "8192", "16384"], "{table}");
    for capacity in [&[8192, 16384][..], &[]] {
        let error = with(capacity, &[8192, 16384]).unwrap_err().to_string();
        assert!(error.contains("--capacity must be one size"), "{error}");
    }
}
