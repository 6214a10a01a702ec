import pytest

from m2flow.worker.watchdog import Watchdog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_silence_is_reported_once_and_again_when_it_has_doubled() -> None:
    clock = Clock()
    said: list[str] = []
    dog = Watchdog(10.0, said.append, clock=clock)
    dog.add_witness(lambda now: [f"rollout.0: in generate since {now - 3:.0f}"])
    clock.now = 9.0
    assert dog.look() == 1.0
    assert said == []
    clock.now = 10.0
    assert dog.look() == 10.0
    clock.now = 19.0
    dog.look()
    assert said == ["nothing has happened for 10 s\n  rollout.0: in generate since 7"]
    clock.now = 20.0
    dog.look()
    assert len(said) == 2


def test_what_happens_ends_the_silence() -> None:
    clock = Clock()
    said: list[str] = []
    dog = Watchdog(10.0, said.append, clock=clock)
    clock.now = 9.0
    dog.stir()
    clock.now = 18.0
    assert dog.look() == 1.0
    clock.now = 19.0
    dog.look()
    assert said == ["nothing has happened for 10 s\n  nobody waits for anything"]


@pytest.mark.parametrize("silence_s", [0.0, -1.0, float("nan")])
def test_no_silence_is_refused(silence_s: float) -> None:
    with pytest.raises(ValueError, match="more than 0"):
        Watchdog(silence_s, print)
