//! Every hand-over and every planted fault of the library, one test each.

mod service {
    use rootstock_schedules::service::wishes as them;

    #[test]
    fn every_wish_is_granted_whenever_it_comes() {
        them::every_wish_is_granted_whenever_it_comes();
    }

    #[test]
    fn a_wish_before_its_request_is_live_would_be_lost_without_the_second_count() {
        them::a_wish_before_its_request_is_live_would_be_lost_without_the_second_count();
    }

    #[test]
    fn a_count_before_the_mark_would_be_slept_over() {
        them::a_count_before_the_mark_would_be_slept_over();
    }
}

mod kv_events {
    use rootstock_schedules::kv_events::readers as them;

    #[test]
    fn readers_hear_the_last_message_and_all_in_order() {
        them::readers_hear_the_last_message_and_all_in_order();
    }

    #[test]
    fn an_account_is_told_in_one_whoever_else_writes() {
        them::an_account_is_told_in_one_whoever_else_writes();
    }

    #[test]
    fn a_place_noted_before_its_account_would_be_another_messages() {
        them::a_place_noted_before_its_account_would_be_another_messages();
    }

    #[test]
    fn a_watch_taken_after_the_look_would_sleep_over_a_message() {
        them::a_watch_taken_after_the_look_would_sleep_over_a_message();
    }
}
