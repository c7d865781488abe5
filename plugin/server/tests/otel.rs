//! Spans of requests at a collector on this machine, which reads OTLP's protobuf: what they say,
//! whose trace they go on with, and that no collector can hold the server up.
#![cfg(unix)]
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests stop at the first surprise"
)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;

#[path = "support/running.rs"]
#[expect(dead_code, reason = "shared with the other tests of the binary")]
mod running;

use running::{Running, rootstock};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// A collector: what came, post by post.
struct Collector {
    address: String,
    posts: Receiver<ExportTraceServiceRequest>,
}

impl Collector {
    fn start() -> Collector {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let (to, posts) = channel();
        std::thread::spawn(move || {
            for socket in listener.incoming() {
                let to = to.clone();
                std::thread::spawn(move || take(&socket.unwrap(), &to));
            }
        });
        Collector { address, posts }
    }

    /// The spans of the next post, and the attributes of who sent it.
    fn post(&self) -> (Vec<Span>, Vec<KeyValue>) {
        let post = self.posts.recv().unwrap();
        let [resource] = post.resource_spans.try_into().unwrap();
        let [scope] = resource.scope_spans.try_into().unwrap();
        (scope.spans, resource.resource.unwrap().attributes)
    }
}

/// Takes the posts of one connection.
fn take(socket: &TcpStream, to: &Sender<ExportTraceServiceRequest>) {
    let mut from = BufReader::new(socket);
    loop {
        let mut length = 0;
        let mut first = String::new();
        if from.read_line(&mut first).unwrap_or(0) == 0 {
            return;
        }
        assert!(first.starts_with("POST /v1/traces "), "{first}");
        loop {
            let mut line = String::new();
            from.read_line(&mut line).unwrap();
            let line = line.trim().to_ascii_lowercase();
            match line.split_once(": ") {
                Some(("content-length", value)) => length = value.parse().unwrap(),
                Some(("content-type", value)) => assert_eq!(value, "application/x-protobuf"),
                Some(_) => {}
                None => break,
            }
        }
        let mut body = vec![0; length];
        from.read_exact(&mut body).unwrap();
        let post = ExportTraceServiceRequest::decode(&body[..]).unwrap();
        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
        let mut socket = socket;
        socket.write_all(answer).unwrap();
        to.send(post).unwrap();
    }
}

/// A chat of an agent program, with further headers.
fn chat(server: &Running, headers: &str, answers: u32) -> String {
    let text = "one two three four five six seven eight nine ten ".repeat(4);
    let body = format!(
        "{{\"messages\":[{{\"role\":\"user\",\"content\":{text:?}}}],\"max_tokens\":4,\
         \"n\":{answers},\
         \"nvext\":{{\"agent_hints\":{{\"priority\":3,\"program_id\":\"an-agent\"}}}}}}"
    );
    post(server, headers, &body)
}

fn post(server: &Running, headers: &str, body: &str) -> String {
    let mut socket = TcpStream::connect(&server.address).unwrap();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-length: {}\r\n\
         connection: close\r\n{headers}\r\n",
        body.len()
    );
    socket.write_all(head.as_bytes()).unwrap();
    socket.write_all(body.as_bytes()).unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    answer
}

fn value(attributes: &[KeyValue], key: &str) -> Value {
    let found = attributes.iter().find(|attribute| attribute.key == key);
    let found = found.unwrap_or_else(|| panic!("no {key} in {attributes:?}"));
    found.value.clone().unwrap().value.unwrap()
}

fn number(span: &Span, key: &str) -> i64 {
    let Value::IntValue(number) = value(&span.attributes, key) else {
        panic!("{key} is no number")
    };
    number
}

fn text(span: &Span, key: &str) -> String {
    let Value::StringValue(text) = value(&span.attributes, key) else {
        panic!("{key} is no text")
    };
    text
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The value of a metric.
fn metric(server: &Running, name: &str) -> Option<f64> {
    let mut text = String::new();
    server.get("/metrics").read_to_string(&mut text).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().parse().ok()
}

#[test]
fn a_request_is_one_span_with_its_phases_and_goes_on_with_the_clients_trace() {
    let collector = Collector::start();
    let server = Running::start(&["--otlp-endpoint", &collector.address]);
    let headers = format!("traceparent: 00-{TRACE}-{PARENT}-01\r\nx-request-id: mine\r\n");
    assert!(chat(&server, &headers, 1).starts_with("HTTP/1.1 200"));
    let (spans, resource) = collector.post();
    let service = value(&resource, "service.name");
    assert_eq!(service, Value::StringValue("rootstock".to_owned()));
    let names: Vec<_> = spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(names, ["request", "queue", "prefill", "decode"]);
    let root = &spans[0];
    assert_eq!(
        (hex(&root.trace_id), hex(&root.parent_span_id)),
        (TRACE.into(), PARENT.into())
    );
    assert_eq!(text(root, "rootstock.request_id"), "mine");
    assert_eq!(text(root, "gen_ai.request.model"), "tiny");
    assert_eq!(text(root, "rootstock.program"), "an-agent");
    assert_eq!(text(root, "rootstock.class"), "high");
    assert_eq!(text(root, "url.path"), "/v1/chat/completions");
    let prompt = number(root, "gen_ai.usage.input_tokens");
    assert!(prompt > 100, "{prompt}");
    assert_eq!(number(root, "rootstock.cached_tokens.device"), 0);
    let output = number(root, "gen_ai.usage.output_tokens");
    assert!((1..=4).contains(&output), "{output}");
    let Value::ArrayValue(reasons) = value(&root.attributes, "gen_ai.response.finish_reasons")
    else {
        panic!("no list of reasons")
    };
    let [
        AnyValue {
            value: Some(Value::StringValue(reason)),
            ..
        },
    ] = &reasons.values[..]
    else {
        panic!("not one reason: {reasons:?}")
    };
    assert!(["stop", "length"].contains(&reason.as_str()), "{reason}");
    // The phases follow each other, inside the request.
    for pair in spans[1..].windows(2) {
        assert_eq!(pair[0].end_time_unix_nano, pair[1].start_time_unix_nano);
    }
    for span in &spans {
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano);
        assert!(root.start_time_unix_nano <= span.start_time_unix_nano);
    }
    for span in &spans[1..] {
        assert_eq!(span.trace_id, root.trace_id);
        assert_eq!(span.parent_span_id, root.span_id);
    }
    assert_eq!(number(&spans[2], "rootstock.computed_tokens"), prompt);

    // Without a place of the client's: a trace of its own. Two answers: the prompt counts once.
    chat(&server, "", 2);
    let (warm, _) = collector.post();
    assert_eq!(warm.len(), 7, "{warm:?}");
    assert_ne!(warm[0].trace_id, root.trace_id);
    assert!(warm[0].parent_span_id.is_empty());
    assert_eq!(number(&warm[0], "gen_ai.usage.input_tokens"), prompt);
    assert!(number(&warm[0], "rootstock.cached_tokens.device") > 0);
    server.signal("-TERM");
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn what_is_not_sampled_is_not_sent() {
    let collector = Collector::start();
    let server = Running::start(&["--otlp-endpoint", &collector.address]);
    let unsampled = format!("traceparent: 00-{TRACE}-{PARENT}-00\r\n");
    assert!(chat(&server, &unsampled, 1).starts_with("HTTP/1.1 200"));
    // What is no traceparent is none.
    assert!(chat(&server, "traceparent: 00-zz\r\n", 1).starts_with("HTTP/1.1 200"));
    let (spans, _) = collector.post();
    assert_ne!(hex(&spans[0].trace_id), TRACE);
    assert!(spans[0].parent_span_id.is_empty());
    server.signal("-TERM");
    assert_eq!(server.wait(), Some(0));
    assert!(collector.posts.try_recv().is_err(), "one post in all");
}

#[test]
fn what_ended_last_is_sent_before_the_process_ends() {
    let collector = Collector::start();
    let server = Running::start(&["--otlp-endpoint", &collector.address]);
    for _ in 0..5 {
        chat(&server, "", 1);
    }
    server.signal("-TERM");
    assert_eq!(server.wait(), Some(0));
    let posts = collector.posts.try_iter();
    let roots = posts
        .flat_map(|post| post.resource_spans)
        .flat_map(|resource| resource.scope_spans)
        .flat_map(|scope| scope.spans)
        .filter(|span| span.name == "request");
    assert_eq!(roots.count(), 5);
}

#[test]
fn a_collector_that_is_not_there_costs_spans_that_are_counted_and_nothing_else() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", free.local_addr().unwrap());
    drop(free);
    let server = Running::start(&["--otlp-endpoint", &address]);
    assert!(chat(&server, "", 1).starts_with("HTTP/1.1 200"));
    let lost = "rootstock_spans_lost_total{reason=\"export\"}";
    while metric(&server, lost).unwrap() < 1.0 {
        std::thread::park_timeout(std::time::Duration::from_millis(20));
    }
    assert!(chat(&server, "", 1).starts_with("HTTP/1.1 200"));
    assert_eq!(
        metric(&server, "rootstock_spans_lost_total{reason=\"queue\"}"),
        Some(0.0)
    );
    server.signal("-TERM");
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn a_collector_that_never_answers_does_not_hold_up_the_end() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", silent.local_addr().unwrap());
    let mut server = Running::start(&["--otlp-endpoint", &address, "--drain-timeout-s", "0"]);
    assert!(chat(&server, "", 1).starts_with("HTTP/1.1 200"));
    server.signal("-TERM");
    let mut rest = String::new();
    server.stderr.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("before all spans were sent"), "{rest}");
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn the_standard_environment_names_the_collector_unless_ours_does() {
    let endpoint = |variables: &[(&str, &str)]| {
        let mut command = rootstock(&["--print-config"]);
        command.envs(variables.iter().copied());
        let output = command.output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let standard = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:4318");
    let printed = endpoint(&[standard]);
    assert!(
        printed.contains("otlp-endpoint = \"http://a:4318\""),
        "{printed}"
    );
    let printed = endpoint(&[standard, ("ROOTSTOCK_OTLP_ENDPOINT", "http://b")]);
    assert!(
        printed.contains("otlp-endpoint = \"http://b\""),
        "{printed}"
    );
}
