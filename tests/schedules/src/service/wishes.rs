//! A ticket's holder wishes while the core thread takes the submission in, works and sleeps: the
//! wish is granted, once the request is live, and the core thread never sleeps over it.

use shuttle::sync::Arc;
use shuttle::sync::mpsc::{Receiver, SyncSender, sync_channel};
use shuttle::thread;

use super::sync::{AtomicU8, AtomicUsize, Ordering};
use super::wish::{Control, Wish, Wishes};
use crate::{is_found, under_all_schedules};

/// Messages that fit the inbox: few, so that it is full at times.
const INBOX: usize = 2;

enum Message {
    Submit(Arc<Control>),
    Wake,
}

#[derive(Default)]
struct Shared {
    wishes: Wishes,
}

/// As the core thread: messages in turns, then the wishes. Ends when all of `requests` were granted
/// an abort; if it sleeps over one, nobody runs any more, which shuttle reports.
fn core_thread(inbox: &Receiver<Message>, shared: &Shared, requests: usize, recount: bool) {
    let (mut live, mut granted) = (Vec::new(), 0);
    while granted < requests {
        let mut next = inbox.recv().ok();
        while let Some(message) = next {
            if let Message::Submit(control) = message {
                if recount && control.wish().is_some() {
                    shared.wishes.count();
                }
                live.push(control);
            }
            next = inbox.try_recv().ok();
        }
        if shared.wishes.take() {
            live.retain(|control: &Arc<Control>| {
                let ends = control.wish() == Some(Wish::Abort);
                if ends {
                    control.set_done();
                    granted += 1;
                }
                !ends
            });
        }
    }
}

fn holder(inbox: &SyncSender<Message>, shared: &Shared) {
    let control = Arc::new(Control::default());
    assert!(inbox.send(Message::Submit(Arc::clone(&control))).is_ok());
    for wish in [Wish::Finish, Wish::Abort, Wish::Abort] {
        if control.want(wish, &shared.wishes) {
            // A full inbox wakes by itself.
            let _full = inbox.try_send(Message::Wake);
        }
    }
}

fn wishes(holders: usize, recount: bool) {
    let (to, inbox) = sync_channel(INBOX);
    let shared = Arc::new(Shared::default());
    let threads: Vec<_> = (0..holders)
        .map(|_| {
            let (to, shared) = (to.clone(), Arc::clone(&shared));
            // The handles outlive the core thread, as a service does: nobody hangs up.
            thread::spawn(move || {
                holder(&to, &shared);
                to
            })
        })
        .collect();
    core_thread(&inbox, &shared, holders, recount);
    for thread in threads {
        drop(thread.join());
    }
}

/// A test of `tests/all.rs`.
pub fn every_wish_is_granted_whenever_it_comes() {
    under_all_schedules(|| wishes(1, true));
    under_all_schedules(|| wishes(3, true));
}

/// A test of `tests/all.rs`.
pub fn a_wish_before_its_request_is_live_would_be_lost_without_the_second_count() {
    is_found(|| wishes(2, false));
}

/// The same protocol with the count before the mark.
fn count_before_mark() {
    let (to, inbox) = sync_channel::<()>(1);
    let (mark, count) = (Arc::new(AtomicU8::new(0)), Arc::new(AtomicUsize::new(0)));
    let (its_mark, its_count) = (Arc::clone(&mark), Arc::clone(&count));
    let holder = thread::spawn(move || {
        its_count.fetch_add(1, Ordering::AcqRel);
        let _full = to.try_send(());
        its_mark.store(2, Ordering::Release);
        to
    });
    loop {
        inbox.recv().ok();
        if count.swap(0, Ordering::AcqRel) > 0 && mark.load(Ordering::Acquire) == 2 {
            break;
        }
    }
    drop(holder.join());
}

/// A test of `tests/all.rs`.
pub fn a_count_before_the_mark_would_be_slept_over() {
    is_found(count_before_mark);
}
