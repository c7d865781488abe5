//! Sampling against a plain model and by its promises.

use super::*;

const LOGITS: [f32; 6] = [1.0, 3.0, -1.0, 3.0, 0.0, 2.0];

fn draw_with(args: &SampleArgs<'_>) -> u32 {
    sample(&mut LOGITS.to_vec(), args, &mut SampleScratch::default())
        .unwrap()
        .token
}

fn warm() -> SampleArgs<'static> {
    SampleArgs {
        temperature: 1.0,
        ..SampleArgs::GREEDY
    }
}

#[test]
fn greedy_takes_the_lower_token_of_a_tie() {
    assert_eq!(draw_with(&SampleArgs::GREEDY), 1);
}

#[test]
fn a_draw_depends_on_seed_and_index_only() {
    let at = |seed, output_index| {
        draw_with(&SampleArgs {
            seed,
            output_index,
            ..warm()
        })
    };
    let first: Vec<u32> = (0..64).map(|i| at(7, i)).collect();
    let again: Vec<u32> = (0..64).map(|i| at(7, i)).collect();
    let other: Vec<u32> = (0..64).map(|i| at(8, i)).collect();
    assert_eq!(first, again);
    assert_ne!(first, other);
}

#[test]
fn frequencies_follow_the_probabilities() {
    let mut expected = LOGITS;
    super::super::norm::softmax(&mut expected);
    let mut counts = [0_u32; 6];
    for output_index in 0..20_000 {
        counts[draw_with(&SampleArgs {
            output_index,
            ..warm()
        }) as usize] += 1;
    }
    for (count, p) in counts.iter().zip(expected) {
        // Five standard deviations of a binomial of 20000.
        let bound = 5.0 * (p * (1.0 - p) / 20_000.0).sqrt();
        assert!(
            (*count as f32 / 20_000.0 - p).abs() < bound,
            "{counts:?} {expected:?}"
        );
    }
}

#[test]
fn filters_keep_the_likeliest_tokens_only() {
    let seen = |args: SampleArgs<'_>| {
        let mut seen: Vec<u32> = (0..500)
            .map(|i| {
                draw_with(&SampleArgs {
                    output_index: i,
                    ..args
                })
            })
            .collect();
        seen.sort_unstable();
        seen.dedup();
        seen
    };
    assert_eq!(seen(SampleArgs { top_k: 1, ..warm() }), [1]);
    assert_eq!(seen(SampleArgs { top_k: 3, ..warm() }), [1, 3, 5]);
    // p = 0.38, 0.38, 0.14, 0.05, 0.02, 0.01.
    assert_eq!(
        seen(SampleArgs {
            top_p: 0.3,
            ..warm()
        }),
        [1]
    );
    assert_eq!(
        seen(SampleArgs {
            top_p: 0.8,
            ..warm()
        }),
        [1, 3, 5]
    );
    assert_eq!(
        seen(SampleArgs {
            min_p: 0.3,
            ..warm()
        }),
        [1, 3, 5]
    );
    assert_eq!(
        seen(SampleArgs {
            mask: Some(&[0b10_0101]),
            ..warm()
        }),
        [0, 2, 5]
    );
    assert_eq!(
        seen(SampleArgs {
            temperature: 0.01,
            ..warm()
        }),
        [1, 3]
    );
}

#[test]
fn penalties_and_bias_move_the_greedy_choice() {
    let greedy = SampleArgs::GREEDY;
    let with = |args: SampleArgs<'_>| draw_with(&args);
    assert_eq!(
        with(SampleArgs {
            logit_bias: &[(4, 9.0), (99, 50.0)],
            ..greedy
        }),
        4
    );
    assert_eq!(
        with(SampleArgs {
            logit_bias: &[(1, f32::NEG_INFINITY)],
            ..greedy
        }),
        3
    );
    assert_eq!(
        with(SampleArgs {
            repetition_penalty: 2.0,
            prompt: &[1, 1],
            ..greedy
        }),
        3
    );
    assert_eq!(
        with(SampleArgs {
            presence_penalty: 0.5,
            output: &[1],
            ..greedy
        }),
        3
    );
    assert_eq!(
        with(SampleArgs {
            frequency_penalty: 0.6,
            output: &[1, 1, 3, 3],
            ..greedy
        }),
        5
    );
    // A presence penalty counts a token once.
    assert_eq!(
        with(SampleArgs {
            presence_penalty: 0.6,
            output: &[1, 1, 3, 3],
            ..greedy
        }),
        1
    );
}

#[test]
fn logprobs_are_those_of_the_raw_logits() {
    let args = SampleArgs {
        logprobs: Some(2),
        logit_bias: &[(4, 9.0)],
        ..SampleArgs::GREEDY
    };
    let drawn = sample(&mut LOGITS.to_vec(), &args, &mut SampleScratch::default()).unwrap();
    let mut p = LOGITS;
    super::super::norm::softmax(&mut p);
    assert_eq!(drawn.token, 4);
    assert!((drawn.logprob.unwrap() - p[4].ln()).abs() < 1e-5);
    assert_eq!(drawn.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 3]);
    assert!((drawn.top[0].1 - p[1].ln()).abs() < 1e-5);
}

#[test]
fn nothing_to_draw_is_an_error_in_both_modes() {
    for temperature in [0.0, 1.0] {
        for mut logits in [vec![], vec![f32::NAN; 3], vec![f32::NEG_INFINITY; 3]] {
            let args = SampleArgs {
                temperature,
                ..SampleArgs::GREEDY
            };
            let result = sample(&mut logits, &args, &mut SampleScratch::default());
            assert!(
                matches!(result, Err(KernelError::NothingToSample { .. })),
                "{result:?}"
            );
        }
        let args = SampleArgs {
            temperature,
            mask: Some(&[0]),
            ..SampleArgs::GREEDY
        };
        assert!(sample(&mut LOGITS.to_vec(), &args, &mut SampleScratch::default()).is_err());
    }
}

#[test]
fn nan_and_infinite_logits_never_panic() {
    let mut logits = vec![f32::NAN, 1.0, f32::INFINITY, f32::NEG_INFINITY, 2.0];
    let args = SampleArgs {
        top_p: 0.9,
        logprobs: Some(5),
        ..warm()
    };
    let drawn = sample(&mut logits, &args, &mut SampleScratch::default()).unwrap();
    assert_eq!(drawn.token, 2);
    let mut logits = vec![f32::NAN, 1.0, 2.0];
    assert_ne!(
        sample(&mut logits, &args, &mut SampleScratch::default())
            .unwrap()
            .token,
        0
    );
}

#[test]
fn parameters_outside_their_range_are_refused_by_name() {
    let refused = [
        SampleArgs {
            temperature: -1.0,
            ..warm()
        },
        SampleArgs {
            temperature: f32::NAN,
            ..warm()
        },
        SampleArgs {
            top_p: 0.0,
            ..warm()
        },
        SampleArgs {
            min_p: 1.5,
            ..warm()
        },
        SampleArgs {
            repetition_penalty: 0.0,
            ..warm()
        },
        SampleArgs {
            presence_penalty: f32::INFINITY,
            ..warm()
        },
        SampleArgs {
            frequency_penalty: f32::NAN,
            ..warm()
        },
    ];
    for args in refused {
        let result = sample(&mut LOGITS.to_vec(), &args, &mut SampleScratch::default());
        assert!(
            matches!(result, Err(KernelError::SampleParameter { .. })),
            "{args:?}"
        );
    }
}

#[test]
fn a_nucleus_beyond_the_first_sorted_part_equals_a_full_sort() {
    let vocab = 5000_u32;
    let logits: Vec<f32> = (0..vocab)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 22) as f32 / 600.0)
        .collect();
    let mut order: Vec<u32> = (0..vocab).collect();
    order.sort_by(|a, b| {
        logits[*b as usize]
            .total_cmp(&logits[*a as usize])
            .then(a.cmp(b))
    });
    let max = logits[order[0] as usize];
    let weights: Vec<f64> = order
        .iter()
        .map(|t| f64::from(logits[*t as usize] - max).exp())
        .collect();
    let mass = 0.9 * weights.iter().sum::<f64>();
    let mut sum = 0.0;
    let kept = weights
        .iter()
        .position(|w| {
            sum += w;
            sum >= mass
        })
        .unwrap()
        + 1;
    assert!(kept > FIRST_SORTED);
    let mut candidates = Vec::new();
    let args = SampleArgs {
        top_p: 0.9,
        ..warm()
    };
    draw(&logits, &args, &mut candidates);
    let found: Vec<u32> = candidates.iter().map(|c| c.token).collect();
    // Sums of weights in another order may move the edge by one token.
    assert!(found.len().abs_diff(kept) <= 1);
    assert_eq!(
        found[..found.len().min(kept)],
        order[..found.len().min(kept)]
    );
}
