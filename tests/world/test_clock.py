"""mingpt.world.clock: each second belongs to one phase, and those in which the process did not run to their own."""

from mingpt.world.clock import LEAST_PAUSE, PAUSED, Clock, Pauses


def test_a_pause_is_a_phase_of_its_own_whatever_was_going_on() -> None:
    """Told by another thread, before the phase ends or after."""
    now = [0.0]
    clock = Clock("step", lambda: now[0])
    now[0] += 40  # 10 of work, 30 of a pause
    clock.pause(30)
    assert clock.seconds("step") == 10
    clock.enter("wait")
    assert clock.account() == {"step": 10, PAUSED: 30, "wait": 0}
    now[0] += 32
    clock.enter("step")  # "wait" has the pause, since nobody had told
    clock.pause(30)
    now[0] += 1
    assert clock.account() == {"step": 11, "wait": 2, PAUSED: 60}
    assert sum(clock.account().values()) == now[0]


def test_what_counts_as_a_pause() -> None:
    now, cpu = [100.0], [7.0]
    pauses = Pauses(lambda: now[0], lambda: cpu[0])

    def after(seconds: float, computed: float = 0.0) -> float:
        now[0] += seconds
        cpu[0] += computed
        return pauses.look(1.0)

    assert after(1.0) == after(0.25) == after(LEAST_PAUSE) == 0
    assert after(31.0) == 30
    assert after(31.0, computed=29.0) == 0  # the interpreter lock was held
    assert after(1.0) == 0
