//! The hash of a plan covers every field of it.

use std::sync::Arc;

use rootstock::journal::PlanHasher;
use rootstock::memory::{CopyClass, CopyId, CopyPlan, PageId, ReplicaId, StepId, TierId};
use rootstock::radix::{CacheConfig, NamespaceId, NamespaceKey, PrefixCache};
use rootstock::scheduler::{
    History, MaskId, RequestId, Row, RowInput, SampleSpec, SamplingParams, StepPlan,
};

fn namespaces() -> [NamespaceId; 2] {
    let mut cache = PrefixCache::new(&CacheConfig::default()).expect("a cache");
    ["a", "b"].map(|model| {
        let key = NamespaceKey {
            model: model.to_owned(),
            ..NamespaceKey::default()
        };
        cache.namespace(&key).expect("a namespace")
    })
}

fn plan(ns: NamespaceId) -> StepPlan {
    let pages = [1, 2, 3].map(PageId::new);
    let sample = SampleSpec {
        params: Arc::new(SamplingParams::default()),
        output_index: 4,
        suppress: Some(Arc::from([2])),
        history: Some(History {
            tokens: vec![1, 2],
            prompt_tokens: 1,
        }),
    };
    let row = Row {
        request: RequestId(5),
        ns,
        tokens: 0..2,
        input: RowInput::FromStep {
            step: StepId(8),
            row: 1,
        },
        first_pos: 7,
        len: 2,
        pages: 0..3,
        sample: Some(sample),
        drafts: 1,
        guesses: 1..2,
        mask: Some(MaskId(6)),
    };
    let copy = CopyPlan {
        id: CopyId(1),
        from: (TierId::Device(ReplicaId(0)), Box::from(&pages[..1])),
        to: (TierId::Host, Box::from(&pages[1..2])),
        layers: 0..4,
        class: CopyClass::Demote,
        deadline: None,
    };
    StepPlan {
        id: StepId(9),
        replica: ReplicaId(0),
        rows: vec![row],
        tokens: vec![10, 11],
        page_tables: pages.to_vec(),
        copies: vec![copy],
        after: vec![CopyId(3)],
        overtakes: false,
    }
}

type Change = fn(&mut StepPlan, NamespaceId);

const OF_THE_PLAN: &[Change] = &[
    |plan, _| plan.id.0 += 1,
    |plan, _| plan.replica.0 += 1,
    |plan, _| plan.rows.clear(),
    |plan, _| plan.tokens[1] += 1,
    |plan, _| plan.page_tables[2] = PageId::new(9),
    |plan, _| plan.after[0].0 += 1,
    |plan, _| plan.overtakes = true,
    |plan, _| plan.copies[0].id.0 += 1,
    |plan, _| plan.copies[0].from.0 = TierId::Device(ReplicaId(1)),
    |plan, _| plan.copies[0].to.0 = TierId::Storage,
    |plan, _| plan.copies[0].to.1[0] = PageId::new(9),
    |plan, _| plan.copies[0].layers.end += 1,
    |plan, _| plan.copies[0].class = CopyClass::Pin,
    |plan, _| plan.copies[0].deadline = Some(1),
];

const OF_A_ROW: &[Change] = &[
    |plan, _| plan.rows[0].request.0 += 1,
    |plan, other| plan.rows[0].ns = other,
    |plan, _| plan.rows[0].tokens.end -= 1,
    |plan, _| plan.rows[0].input = RowInput::Known,
    |plan, _| {
        plan.rows[0].input = RowInput::FromStep {
            step: StepId(8),
            row: 2,
        }
    },
    |plan, _| plan.rows[0].first_pos += 1,
    |plan, _| plan.rows[0].len += 1,
    |plan, _| plan.rows[0].pages.start += 1,
    |plan, _| plan.rows[0].sample = None,
    |plan, _| plan.rows[0].drafts += 1,
    |plan, _| plan.rows[0].guesses.start -= 1,
    |plan, _| plan.rows[0].mask = None,
    |plan, _| sample(plan).output_index += 1,
    |plan, _| sample(plan).suppress = None,
    |plan, _| sample(plan).suppress = Some(Arc::from([])),
    |plan, _| sample(plan).history = None,
    |plan, _| params(plan).temperature += 0.5,
    |plan, _| params(plan).top_k += 1,
    |plan, _| params(plan).top_p -= 0.5,
    |plan, _| params(plan).min_p += 0.5,
    |plan, _| params(plan).seed += 1,
    |plan, _| params(plan).repetition_penalty += 0.5,
    |plan, _| params(plan).frequency_penalty += 0.5,
    |plan, _| params(plan).presence_penalty += 0.5,
    |plan, _| params(plan).logit_bias.push((1, 0.5)),
    |plan, _| params(plan).logprobs = Some(0),
];

fn sample(plan: &mut StepPlan) -> &mut SampleSpec {
    plan.rows[0].sample.as_mut().expect("the row samples")
}

fn params(plan: &mut StepPlan) -> &mut SamplingParams {
    Arc::make_mut(&mut sample(plan).params)
}

#[test]
fn every_field_of_a_plan_changes_its_hash() {
    let [ns, other] = namespaces();
    let mut hasher = PlanHasher::default();
    let base = hasher.mark(Some(&plan(ns)));
    assert_eq!(
        hasher.mark(Some(&plan(ns))),
        base,
        "equal plans have equal marks"
    );
    let mut hashes = vec![base.hash];
    for (index, change) in OF_THE_PLAN.iter().chain(OF_A_ROW).enumerate() {
        let mut changed = plan(ns);
        change(&mut changed, other);
        let mark = hasher.mark(Some(&changed));
        assert!(
            !hashes.contains(&mark.hash),
            "change {index} is not in the hash"
        );
        hashes.push(mark.hash);
    }
}

#[test]
fn the_hash_of_a_plan_is_the_same_on_every_machine() {
    let [ns, _] = namespaces();
    let mark = PlanHasher::default().mark(Some(&plan(ns)));
    // Another value here is another form of the journal: raise JOURNAL_VERSION with it.
    assert_eq!(format!("{:016x}", mark.hash), "b66ee13fd214fc33");
    assert!(
        PlanHasher::default()
            .mark(None)
            .to_string()
            .starts_with("no plan")
    );
}
