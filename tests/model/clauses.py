"""The clauses of the renting protocol, each of which can be dropped, one at a time, to see what it is for.

The words are those of the protocol's rules, shortened; the number in front is the rule's. `SEEDS` in
`tests.model.test_model` names, for each, a schedule that goes wrong without it.
"""

from enum import StrEnum


class Clause(StrEnum):
    """One thing that the protocol says must be done, or must not."""

    ONCE = "1: only an open rental is rented for"
    ENDING_FIRST = "1: release commits ending before its first call"
    MISSING_IS_ENDING = "1: where there is no row, release inserts one as ending"
    ENSURE_ALONE = "in one process, one call of ensure at a time works for a claim, release beside it"
    ONE_AT_A_TIME = "2: an intent finds no unsettled attempt"
    MARK = "2: the claim is marked before anything is sent"
    MARK_COMPARES = "2: a mark is written only over the claim that was looked at"
    UNMARKED_STAYS = (
        "2: an attempt whose mark was refused stays unsettled: the next call judges it by the mark"
    )
    SEQUENCE_ABOVE = "2: sequences go on above every mark, and above what the clouds show"
    FENCE_ROWS = "3: before a send, the rental is still open and the attempt row still there, unsettled"
    FENCE_LEADER = "3: before a send, still leader at this epoch"
    FENCE_SEND_BY = "3: before a send, send_by has not passed, by a clock read before the insert"
    EPOCH_ABOVE_BOTH = "3: an epoch is above the Lease's and the store's"
    EPOCH_COMPARES = "every change of state compares the leader's epoch"
    ONE_SEND = "4: no retries inside the client"
    RECORD_AT_ONCE = "5: the attempt is closed and its machine recorded in one transaction"
    FIRST_SEND = "6: a rejection counts only as the answer to the first and only send"
    UNKNOWN_WAITS = "7: after an unknown outcome nothing is sent until it is settled"
    TWO_LISTS = "7: absent means two complete lists"
    SETTLE_AFTER = "7: the later list begins settle_after past send_by and the client's time-out"
    BOTH_SETTLE = "7: and so does the earlier one: a list may leave out once what was too young for that"
    SHOWN_IS_FOUND = "7: what any round has shown is there until a get says otherwise"
    GONE_BY_GET = "7: two complete lists without a recorded machine do not make it gone: a get does"
    REPLAY_OPEN = "7: only while the rental is open is an attempt sent again"
    REPLAY_IS_A_SEND = "7: a replay has a send_by and a mark of its own"
    REPLAY_IN_TIME = "7: a replay's last possible effect is within replay_for of the first send"
    MARK_LIVE = "8: marks are read live, never from a cache"
    ROWS_NEED_MARK = "8: rows are believed only where they contain the marked attempt"
    MARK_DATES = "8: an attempt of the marked number whose send_by is older is not the marked one"
    RESTORE_SEEN = "8: a store that was restored is met as by a new leader: epoch, rows, nothing remembered"
    ADOPT = "9: while open, the oldest machine found is adopted"
    END_EXTRAS = "9: once one is recorded, the others are ended"
    EXTRA_KEEPS_STATE = "9: ending an extra does not change the rental's state"
    GONE_IS_RELEASED = "9: a rental whose claim is gone is released"
    STRAYS_END = (
        "9: a run of no rental, or of an ended one, is closed once a get says that its machine is gone"
    )
    EVERY_ATTEMPT = "release: a machine of one attempt settles no other attempt"
    BY_IDENTITY = "release: what carries the claim's identity is ended, recorded or not"
    AFTER_TERMINATE = "release: both lists begin after the last accepted terminate"
    GET_CONFIRMS = "release: a get by each recorded id says gone"
    NEVER_SHOWN_WAITS = "release: for what nobody was ever shown, the later list waits for settle_after"
    NOT_FOUND_REPEATS = "release: a NotFound for a fresh id is not gone, and terminate is repeated"
    TERMINATE_REPEATS = "release: a machine still shown after an accepted terminate is ended again"
    LOOK_AFTER_ENDING = "release: a claim without a mark ends at once only if read after ending"
    STRICT_END = "release: strictly from ending to ended"
    FINALIZER_LAST = "release: the finalizer goes only after ended"
    ROWS_FIRST = "no store: the finalizer waits until the rows are back"
    REMEMBERED = "no store: a machine is written on its claim before it is ended"


IMPLIED = {
    Clause.ONE_AT_A_TIME: (
        "where every call waits for what is unsettled (UNKNOWN_WAITS), calls for one claim take turns"
        " (ENSURE_ALONE), and a former leader's intent fails by its epoch, no intent can find an unsettled"
        " attempt. Kept: it is the row's own guard, and holds whoever calls"
    ),
    Clause.SHOWN_IS_FOUND: (
        "two lists that begin late enough (BOTH_SETTLE) cannot both leave out a machine, so what was shown is"
        " found by them. Kept for a cloud whose lists leave it out for longer than is taken for granted"
    ),
    Clause.AFTER_TERMINATE: (
        "a get by each recorded id (GET_CONFIRMS) tells the truth of what was shown once, and what was not is"
        " waited for, so lists older than the end mislead nobody. Kept for a cloud whose gets forget"
    ),
    Clause.NOT_FOUND_REPEATS: (
        "what a list shows after its end was accepted is ended again (TERMINATE_REPEATS). Kept: else the Pod"
        " would go, and the machine run on, for settle_after longer"
    ),
}
"""Clauses that other ones cover, as long as the world is as `tests.model.world` takes it for granted."""
