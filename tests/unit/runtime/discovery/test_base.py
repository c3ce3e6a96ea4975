"""The view of a bucket: many readers, each of which receives its own changes."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dynamo.runtime.discovery.base import Delete, Put, Roster, Synced, View

KEYS = st.sampled_from("abc")
VALUES = st.sampled_from([b"1", b"2"])


class Reading(RuleBasedStateMachine):
    """For any changes and any times of reading, the reported changes add up to the contents."""

    def __init__(self) -> None:
        super().__init__()
        self.view = View()
        self.watch = self.view.watch()
        self.reported: dict[str, bytes] = {}
        self.synced = 0

    @rule(key=KEYS, value=VALUES)
    def put(self, key: str, value: bytes) -> None:
        self.view.put(key, value)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.view.delete(key)

    @rule(records=st.dictionaries(KEYS, VALUES))
    def replace(self, records: dict[str, bytes]) -> None:
        self.view.replace(records)

    @rule()
    def read(self) -> None:
        while (change := self.watch._take()) is not None:
            match change:
                case Put(key, value):
                    self.reported[key] = value
                case Delete(key):
                    del self.reported[key]
                case Synced():
                    self.synced += 1
        assert self.reported == self.view.records

    @invariant()
    def it_is_synced_once(self) -> None:
        assert self.synced <= int(self.view.is_synced)


Reading.TestCase.settings = settings(max_examples=30, stateful_step_count=20)
TestReading = Reading.TestCase


def test_discovery_drops_a_garbage_collected_reader() -> None:
    view = View()
    watch = view.watch()
    assert len(view._watches) == 1
    del watch
    assert len(view._watches) == 0


ROSTER_KEYS = st.sampled_from(["a", "b", "c"])
ROSTER_VALUES = st.sampled_from([b"1", b"2"])


def test_roster_view_equals_the_last_impatient_listing() -> None:
    roster = Roster()
    roster.replace({"a": b"1", "b": b"2"}, 7, is_patient=False)
    roster.replace({"b": b"3"}, 9, is_patient=False)
    assert (roster.view.records, roster.revision, roster.missing) == ({"b": b"3"}, 9, set())
    assert roster.view.is_synced


def test_roster_keeps_records_missing_from_a_patient_listing_until_forget_missing() -> None:
    roster = Roster()
    roster.replace({"a": b"1", "b": b"2"}, 7, is_patient=False)
    roster.replace({"b": b"3"}, 9, is_patient=True)
    assert roster.view.records == {"a": b"1", "b": b"3"}
    assert roster.forget_missing() == 1
    assert roster.view.records == {"b": b"3"}


def test_roster_does_not_forget_a_record_put_again_after_its_deletion() -> None:
    roster = Roster()
    roster.put("a", b"1")
    roster.delete("a", is_patient=True)
    roster.put("a", b"2")
    assert roster.forget_missing() == 0
    assert roster.view.records == {"a": b"2"}


def test_roster_patient_delete_of_an_unknown_record_is_not_missing() -> None:
    roster = Roster()
    roster.delete("a", is_patient=True)
    assert roster.missing == set()


class AgainstItsModel(RuleBasedStateMachine):
    """Comparison of the registry with a model that records the lost changes."""

    def __init__(self) -> None:
        super().__init__()
        self.roster = Roster()
        self.there: dict[str, bytes] = {}
        self.lost: dict[str, bytes] = {}

    @rule(key=ROSTER_KEYS, value=ROSTER_VALUES)
    def put(self, key: str, value: bytes) -> None:
        self.roster.put(key, value)
        self.there[key] = value
        self.lost.pop(key, None)

    @rule(key=ROSTER_KEYS, is_patient=st.booleans())
    def delete(self, key: str, is_patient: bool) -> None:
        self.roster.delete(key, is_patient=is_patient)
        shown = {**self.lost, **self.there}
        self.there.pop(key, None)
        self.lost.pop(key, None)
        if is_patient and key in shown:
            self.lost[key] = shown[key]

    @rule(records=st.dictionaries(ROSTER_KEYS, ROSTER_VALUES), is_patient=st.booleans())
    def listing(self, records: dict[str, bytes], is_patient: bool) -> None:
        self.roster.replace(records, 1, is_patient=is_patient)
        shown = {**self.lost, **self.there}
        self.lost = {key: value for key, value in shown.items() if key not in records} if is_patient else {}
        self.there = dict(records)

    @rule()
    def end_of_patience(self) -> None:
        assert self.roster.forget_missing() == len(self.lost)
        self.lost.clear()

    @rule(key=ROSTER_KEYS)
    def forget(self, key: str) -> None:
        self.roster.forget(key)
        self.there.pop(key, None)
        self.lost.pop(key, None)

    @invariant()
    def shows_both(self) -> None:
        self.roster.validate()
        assert self.roster.view.records == {**self.lost, **self.there}


TestAgainstItsModel = AgainstItsModel.TestCase
