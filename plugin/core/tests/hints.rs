//! Hints as clients send them: every form reported to have gone wrong elsewhere, and the requests
//! captured from released SDKs.

use rootstock::hints::{
    Ceiling, Compat, NOTES_MAX, ParsedHints, SALT_BYTES_MAX, TTL_CAP_S, WHOLE_PROMPT, parse,
    parse_as,
};
use rootstock::radix::{ContextKind, Retention, Ttl};
use serde_json::{Value, json};

fn nvext(nvext: Value) -> ParsedHints {
    parse(&nvext, &json!({}), &[])
}

fn agent_hints(hints: Value) -> ParsedHints {
    nvext(json!({ "agent_hints": hints }))
}

fn ignored(parsed: &ParsedHints) -> Vec<&str> {
    parsed.hints.ignored.iter().map(String::as_str).collect()
}

#[test]
fn priorities_of_the_full_range_are_taken_as_they_are() {
    for (priority, jump_s) in [
        (10, 10.0),
        (0, 0.0),
        (-5, 0.0),
        (i32::MAX, 2_147_483_647.0),
        (i32::MIN, 0.0),
    ] {
        let parsed = agent_hints(json!({ "priority": priority }));
        assert_eq!(parsed.hints.priority, priority);
        assert_eq!(
            parsed.hints.jump_s.to_bits(),
            f64::to_bits(jump_s),
            "{priority}"
        );
        assert!(ignored(&parsed).is_empty());
    }
}

#[test]
fn priorities_of_another_type_are_noted_and_otherwise_absent() {
    for (value, shown) in [
        (json!(2_147_483_648_i64), "2147483648"),
        (json!(-2_147_483_649_i64), "-2147483649"),
        (json!(1.5), "1.5"),
        (json!(true), "true"),
        (json!("high"), "\"high\""),
        (json!([1, 2]), "a list of 2"),
        (json!({"a": 1}), "an object of 1 fields"),
    ] {
        let parsed = agent_hints(json!({ "priority": value }));
        assert_eq!((parsed.hints.priority, parsed.hints.jump_s), (0, 0.0));
        let note = "agent_hints.priority: expected an integer -2147483648..=2147483647, got ";
        assert_eq!(ignored(&parsed), [format!("{note}{shown}")]);
    }
    let parsed = agent_hints(json!({ "priority": null }));
    assert_eq!(parsed.hints.priority, 0);
    assert!(ignored(&parsed).is_empty(), "a legal null is not a mistake");
}

#[test]
fn output_lengths_are_counts() {
    assert_eq!(agent_hints(json!({"osl": 512})).hints.osl, Some(512));
    for (value, shown) in [
        (json!("LOW"), "\"LOW\""),
        (json!(-1), "-1"),
        (json!(0.5), "0.5"),
    ] {
        let parsed = agent_hints(json!({ "osl": value }));
        assert_eq!(parsed.hints.osl, None);
        let note = format!("agent_hints.osl: expected an integer >= 0, got {shown}");
        assert_eq!(ignored(&parsed), [note]);
    }
}

/// Whoever may not be more important may not jump further by the same word either.
#[test]
fn a_bound_of_the_priority_bounds_the_jump_that_is_made_of_it() {
    let both = json!({"latency_sensitivity": 60, "priority": 99});
    for (compat, hints, most, jump_s) in [
        (Compat::Rootstock, json!({"priority": 99}), 10, 10.0),
        (Compat::Rootstock, json!({"priority": 99}), -4, 0.0),
        (Compat::Rootstock, json!({"priority": 7}), 10, 7.0),
        (Compat::Rootstock, both.clone(), 10, 60.0),
        (
            Compat::Rootstock,
            json!({"latency_sensitivity": 60}),
            10,
            60.0,
        ),
        (Compat::Dynamo16, json!({"priority": 99}), 10, 10.0),
        (Compat::Dynamo16, both, 10, 10.0),
        (
            Compat::Dynamo16,
            json!({"latency_sensitivity": 60}),
            10,
            60.0,
        ),
    ] {
        let shown = format!("{compat:?} {hints} at most {most}");
        let mut parsed = parse_as(compat, &json!({ "agent_hints": hints }), &json!({}), &[]);
        parsed.restrict(&Ceiling {
            priority: most,
            ..Ceiling::default()
        });
        assert!(
            (parsed.hints.jump_s - jump_s).abs() < 1e-9,
            "{shown}: {parsed:?}"
        );
    }
}

#[test]
fn the_jump_is_latency_sensitivity_else_priority_and_never_negative() {
    let jump_s = |compat, hints: Value| {
        parse_as(compat, &json!({ "agent_hints": hints }), &json!({}), &[])
            .hints
            .jump_s
    };
    for (hints, ours, dynamo) in [
        (json!({"latency_sensitivity": 2.5}), 2.5, 2.5),
        (json!({"priority": 7}), 7.0, 7.0),
        (json!({"latency_sensitivity": 2.5, "priority": 7}), 2.5, 7.0),
        (json!({"latency_sensitivity": 2, "priority": -7}), 2.0, 0.0),
        (
            json!({"latency_sensitivity": -2.5, "priority": 7}),
            0.0,
            7.0,
        ),
        (
            json!({"latency_sensitivity": "now", "priority": 7}),
            7.0,
            7.0,
        ),
        (
            json!({"latency_sensitivity": null, "priority": 7}),
            7.0,
            7.0,
        ),
        (json!({}), 0.0, 0.0),
    ] {
        let found = [
            jump_s(Compat::Rootstock, hints.clone()),
            jump_s(Compat::Dynamo16, hints.clone()),
        ];
        assert_eq!(
            found.map(f64::to_bits),
            [ours, dynamo].map(f64::to_bits),
            "{hints}"
        );
    }
    // Priority alone orders preemption and eviction, whatever the jump was made of.
    let parsed = agent_hints(json!({"latency_sensitivity": 2.5, "priority": 7}));
    assert_eq!(parsed.hints.priority, 7);
}

#[test]
fn every_hint_of_every_release_is_read() {
    let parsed = agent_hints(json!({
        "priority": 3, "latency_sensitivity": 1.2, "strict_priority": 4, "osl": 64,
        "speculative_prefill": true, "program_id": "p1", "context_type": "tool_output",
        "prefix_id": "conv-7", "total_requests": 10, "iat": 250
    }));
    let hints = &parsed.hints;
    assert!(hints.ignored.is_empty(), "{:?}", hints.ignored);
    assert_eq!((hints.priority, hints.strict, hints.osl), (3, 4, Some(64)));
    assert_eq!(
        (hints.iat_ms, hints.reuses, hints.speculate),
        (Some(250), Some(10), true)
    );
    assert_eq!(hints.context, Some(ContextKind::ToolOutput));
    assert_eq!(
        hints.program.as_deref(),
        Some("p1"),
        "program_id goes before prefix_id"
    );
}

#[test]
fn unknown_fields_and_wrong_objects_are_noted_by_path() {
    let parsed = nvext(json!({
        "turbo": true,
        "agent_hints": {"mood": 1, "priority": 2, "priority_load_shed_percent": 5},
        "cache_control": [], "router": {"ttft_target": 5.0, "x": 0}
    }));
    assert_eq!(parsed.hints.priority, 2);
    assert_eq!(parsed.routing.ttft_target_ms, Some(5.0));
    let mut notes = ignored(&parsed);
    notes.sort_unstable();
    assert_eq!(
        notes,
        [
            "agent_hints.mood: unknown field",
            "agent_hints.priority_load_shed_percent: unknown field",
            "cache_control: expected an object, got a list of 0",
            "router.x: unknown field",
            "turbo: unknown field",
        ]
    );
    assert_eq!(
        ignored(&nvext(json!("x"))),
        ["nvext: expected an object, got \"x\""]
    );
    assert_eq!(
        ignored(&agent_hints(json!(7))),
        ["agent_hints: expected an object, got 7"]
    );
}

#[test]
fn a_hostile_body_leaves_bounded_notes() {
    let mut map = serde_json::Map::new();
    for n in 0..10_000 {
        map.insert(format!("k{n}{}", "x".repeat(500)), json!(n));
    }
    let parsed = nvext(Value::Object(map));
    assert_eq!(parsed.hints.ignored.len(), NOTES_MAX + 1);
    assert!(parsed.hints.ignored.iter().map(String::len).sum::<usize>() < 8192);
}

#[test]
fn cache_control_pins_the_whole_prompt_for_its_ttl() {
    let pins = |control: Value| nvext(json!({ "cache_control": control })).hints.pins;
    let pin = |seconds| {
        vec![(
            WHOLE_PROMPT,
            Ttl {
                seconds,
                clamped: false,
            },
        )]
    };
    assert_eq!(
        pins(json!({"type": "ephemeral"})),
        pin(300),
        "absent is 5 minutes"
    );
    assert_eq!(pins(json!({})), pin(300));
    for (ttl, seconds) in [
        (json!("5m"), 300),
        (json!("1h"), 3600),
        (json!("90s"), 90),
        (json!("3s"), 3),
        (json!(300), 300),
    ] {
        assert_eq!(
            pins(json!({"type": "ephemeral", "ttl": ttl})),
            pin(seconds),
            "{ttl}"
        );
    }
    assert!(
        pins(json!({"type": "ephemeral", "ttl": "0s"})).is_empty(),
        "no pin asked for"
    );
    assert!(pins(Value::Null).is_empty());
}

#[test]
fn a_ttl_that_cannot_be_read_sets_no_pin_and_is_noted() {
    for ttl in [
        json!("1hr"),
        json!(""),
        json!("-5m"),
        json!("5M"),
        json!(-5),
        json!(1.5),
        json!(true),
    ] {
        let parsed = nvext(json!({"cache_control": {"type": "ephemeral", "ttl": ttl}}));
        assert!(parsed.hints.pins.is_empty(), "{ttl}");
        assert_eq!(parsed.hints.ignored.len(), 1, "{ttl}");
        assert!(parsed.hints.ignored[0].starts_with("cache_control.ttl: expected N, Ns, Nm or Nh"));
    }
    let parsed = nvext(json!({"cache_control": {"type": "persistent", "ttl": "5m"}}));
    assert!(parsed.hints.pins.is_empty());
    assert_eq!(
        ignored(&parsed),
        ["cache_control.type: expected \"ephemeral\" (no pin is set), got \"persistent\""]
    );
}

#[test]
fn a_ttl_above_the_cap_is_clamped_visibly() {
    for ttl in [
        json!("99999999999h"),
        json!("99999999999999999999999"),
        json!(u64::MAX),
    ] {
        let parsed = nvext(json!({"cache_control": {"type": "ephemeral", "ttl": ttl}}));
        let clamped = Ttl {
            seconds: TTL_CAP_S,
            clamped: true,
        };
        assert_eq!(parsed.hints.pins, [(WHOLE_PROMPT, clamped)]);
        assert_eq!(
            ignored(&parsed),
            ["cache_control.ttl: above the cap, clamped to 86400 s"]
        );
    }
}

#[test]
fn a_header_beats_the_body_field_by_field_and_falls_back_when_malformed() {
    let body = json!({
        "agent_hints": {"priority": 1, "strict_priority": 2},
        "backend_instance_id": 5, "decode_worker_id": 6, "dp_rank": 7, "prefill_dp_rank": 1
    });
    let read = |headers: &[(&str, &str)]| parse(&body, &json!({}), headers);
    let parsed = read(&[
        ("X-Dynamo-Request-Priority", "-9"),
        ("x-worker-instance-id", "77"),
        ("x-data-parallel-rank", "3"),
        ("x-dynamo-prefill-dp-rank", "4294967295"),
    ]);
    assert_eq!((parsed.hints.priority, parsed.hints.strict), (-9, 2));
    let routing = &parsed.routing;
    assert_eq!(
        (routing.backend_instance_id, routing.decode_worker_id),
        (Some(77), Some(77))
    );
    assert_eq!((routing.dp_rank, routing.prefill_dp_rank), (Some(3), None));
    assert!(ignored(&parsed).is_empty());

    let parsed = read(&[("x-dynamo-request-priority", "urgent"), ("x-dp-rank", "-1")]);
    assert_eq!(
        (parsed.hints.priority, parsed.routing.dp_rank),
        (1, Some(7))
    );
    assert_eq!(parsed.hints.ignored.len(), 2);
    let parsed = read(&[("x-dynamo-request-priority", "  ")]);
    assert_eq!(
        (parsed.hints.priority, parsed.hints.ignored.len()),
        (1, 0),
        "blank is absent"
    );
}

#[test]
fn the_salt_comes_from_tenant_header_then_nvext_then_the_top_level() {
    let salt =
        |nvext: Value, top: Value, headers: &[(&str, &str)]| parse(&nvext, &top, headers).salt;
    let (inner, outer) = (json!({"cache_salt": "in"}), json!({"cache_salt": "out"}));
    let tenant = [
        ("x-tenant-id", "t0"),
        ("X-Tenant-Id", " t1 "),
        ("x-tenant-id", " "),
    ];
    assert_eq!(
        salt(inner.clone(), outer.clone(), &tenant).as_deref(),
        Some("t1")
    );
    assert_eq!(salt(inner, outer.clone(), &[]).as_deref(), Some("in"));
    assert_eq!(
        salt(json!({"cache_salt": ""}), outer.clone(), &[]).as_deref(),
        Some("out")
    );
    assert_eq!(salt(Value::Null, outer, &[]).as_deref(), Some("out"));
    assert_eq!(
        salt(Value::Null, json!({"cache_salt": ""}), &[]),
        None,
        "empty is absent"
    );
}

#[test]
fn isolation_survives_a_salt_that_is_malformed_or_long() {
    let parsed = nvext(json!({"cache_salt": 7}));
    assert_eq!(parsed.salt.as_deref(), Some("7"));
    assert_eq!(parsed.hints.ignored.len(), 1);
    let long = |text: &str| nvext(json!({ "cache_salt": text })).salt.expect("a salt");
    let (a, b) = (
        long(&"a".repeat(100_000)),
        long(&format!("{}b", "a".repeat(99_999))),
    );
    assert!(a != b && a.len() <= SALT_BYTES_MAX && b.len() <= SALT_BYTES_MAX);
    assert_eq!(
        long(&"a".repeat(SALT_BYTES_MAX)),
        "a".repeat(SALT_BYTES_MAX)
    );
}

#[test]
fn an_operator_bounds_priorities_and_binds_the_salt() {
    let body = json!({
        "agent_hints": {"priority": i32::MAX, "strict_priority": 9, "latency_sensitivity": 99},
        "cache_salt": "victim"
    });
    let mut parsed = parse(&body, &json!({}), &[]);
    parsed.restrict(&Ceiling {
        priority: 5,
        strict: 0,
        jump_s: 30.0,
        ..Ceiling::default()
    });
    parsed.bind_salt("mine");
    assert_eq!((parsed.hints.priority, parsed.hints.strict), (5, 0));
    assert_eq!(parsed.hints.jump_s.to_bits(), 30.0_f64.to_bits());
    assert_eq!(parsed.salt.as_deref(), Some("mine"));
    assert_eq!(parsed.hints.ignored.len(), 4, "every change is told");
    let mut low = agent_hints(json!({"priority": -3}));
    low.restrict(&Ceiling::default());
    assert_eq!((low.hints.priority, low.hints.ignored.len()), (-3, 0));
    low.restrict(&Ceiling {
        jump_s: f64::NAN,
        ..Ceiling::default()
    });
    assert!(low.hints.jump_s >= 0.0);
    let ttl = |seconds| Ttl {
        seconds,
        clamped: false,
    };
    low.restrict(&Ceiling {
        pins: 2,
        pin_s: 60,
        ..Ceiling::default()
    });
    low.pin([(WHOLE_PROMPT, ttl(300)), (16, ttl(30)), (64, ttl(90))]);
    let kept = [(64, ttl(60)), (WHOLE_PROMPT, ttl(60))];
    assert_eq!(
        low.hints.pins, kept,
        "the longest are kept, for as long as may be"
    );
    assert_eq!(low.hints.ignored.len(), 2, "{:?}", low.hints.ignored);
}

#[test]
fn generation_fields_are_read() {
    let parsed = nvext(json!({
        "greed_sampling": true, "use_raw_prompt": true, "token_data": [1, 2, 3],
        "max_thinking_tokens": 9, "annotations": ["token_ids"], "extra_fields": ["timing"],
        "request_timestamp_ms": 1.5,
        "routing_constraints": {"required_taints": ["a"], "preferred_taints": {"b": 0.5}}
    }));
    assert!(ignored(&parsed).is_empty(), "{:?}", parsed.hints.ignored);
    let generation = &parsed.generation;
    assert!(generation.greedy && generation.raw_prompt);
    assert_eq!(generation.token_data.as_deref(), Some(&[1, 2, 3][..]));
    assert_eq!(generation.max_thinking_tokens, Some(9));
    assert_eq!(
        (parsed.annotations.len(), parsed.extra_fields.len()),
        (1, 1)
    );
    assert_eq!(parsed.routing.preferred_taints, [("b".to_owned(), 0.5)]);
    let parsed = nvext(json!({"token_data": [1, -2]}));
    assert_eq!(parsed.generation.token_data, None);
    assert_eq!(parsed.hints.ignored.len(), 1);
}

#[test]
fn retention_is_read_in_seconds_and_in_the_terms_of_tensorrt() {
    let parsed = agent_hints(json!({"priority": 7, "retention_seconds": 90}));
    assert_eq!(
        (parsed.hints.priority, parsed.hints.retention_s),
        (7, Some(90))
    );
    assert!(ignored(&parsed).is_empty());
    let config = json!({
        "token_range_retention_configs": [
            {"token_start": 0, "token_end": 40, "priority": 80, "duration_ms": 30_001},
            {"start": 40, "priority": 0, "duration": null},
        ],
        "decode_retention_priority": 35, "decode_duration_ms": 500,
    });
    let said = |priority, seconds| Retention { priority, seconds };
    let ranges = [(0..40, said(45, Some(31))), (40..u32::MAX, said(-35, None))];
    let top = json!({ "kv_cache_retention_config": config });
    for parsed in [nvext(top.clone()), parse(&Value::Null, &top, &[])] {
        assert_eq!(parsed.hints.retain, ranges);
        assert_eq!(parsed.hints.retain_output, Some(said(0, Some(1))));
        assert!(ignored(&parsed).is_empty(), "{:?}", ignored(&parsed));
    }
}

#[test]
fn retention_that_cannot_be_read_is_noted_and_bounded() {
    let ranges = |ranges: Value| {
        let config = json!({ "token_range_retention_configs": ranges });
        nvext(json!({ "kv_cache_retention_config": config }))
    };
    let parsed = ranges(json!([
        {"token_start": 9, "token_end": 9, "priority": 80},
        {"priority": 101},
        {"token_start": -1, "priority": "high", "duration_ms": -1},
        7,
    ]));
    let said = Retention {
        priority: 65,
        seconds: None,
    };
    assert_eq!(parsed.hints.retain, [(0..u32::MAX, said)]);
    assert_eq!(parsed.hints.ignored.len(), 6, "{:?}", parsed.hints.ignored);
    assert!(ranges(json!({})).hints.retain.is_empty());
    let many = vec![json!({"priority": 50}); 1000];
    assert_eq!(ranges(json!(many)).hints.retain.len(), 64);
    let mut parsed = ranges(json!([{"priority": 100}, {"priority": 30}]));
    let ceiling = Ceiling {
        priority: 5,
        ..Ceiling::default()
    };
    parsed.restrict(&ceiling);
    let priorities = parsed.hints.retain.iter().map(|(_, said)| said.priority);
    assert_eq!(priorities.collect::<Vec<_>>(), [5, -5]);
}
