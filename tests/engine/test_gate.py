"""The gate lets nobody wait for ever, whichever comes first, open or wait, and whether or not the waiter has gone to sleep."""

from __future__ import annotations

import threading

import pytest

from strata.engine.gate import PATIENCE, Gate

ROUNDS = 300


def test_an_open_gate_lets_one_wait_pass() -> None:
    gate = Gate(8)
    gate.open()
    gate.open()
    gate.wait()
    assert not gate._flags[0]


@pytest.mark.parametrize("patient", [True, False])
def test_ping_pong(patient: bool) -> None:
    """Two threads wait for each other; impatient ones always sleep."""
    ping, pong = Gate(8), Gate(16)
    seen: list[int] = []

    def answer() -> None:
        for turn in range(ROUNDS):
            ping.wait()
            seen.append(turn)
            pong.open()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    for turn in range(ROUNDS):
        if not patient:
            ping._debt = pong._debt = 100 * PATIENCE
        ping.open()
        pong.wait()
        assert seen[-1] == turn
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_a_waiter_that_looked_in_vain_sleeps_and_is_woken() -> None:
    gate, passed = Gate(4), threading.Event()
    thread = threading.Thread(target=lambda: (gate.wait(), passed.set()), daemon=True)
    thread.start()
    while not gate._asleep:
        assert not passed.is_set()
    gate.open()
    assert passed.wait(60)
    assert gate._debt > 0
